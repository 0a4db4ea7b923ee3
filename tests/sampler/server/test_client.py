"""The client of a running server, over sockets: one deadline, and an end at once when it is closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from runner.core.errors import SamplerError
from runner.sampler.server.openai_client import OpenAiClient
from tests.dripping import HEAD, WAYS, dripping
from tests.sampler.server.test_server import made


@WAYS
def test_one_deadline_covers_connection_headers_and_body(sent: bytes, drop: bytes, tmp_path: Path) -> None:
    with (
        dripping(sent, drop) as server,
        pytest.raises(SamplerError, match=r"no complete response .*sampler\.timeout_s"),
    ):
        made(server.url, tmp_path, timeout_s=0.3, retries=0)
    assert server.left.is_set()


def test_closing_ends_a_request_in_the_middle_of_its_answer() -> None:
    with dripping(HEAD, b"X-Wait: 1\r\n") as server:
        client = OpenAiClient(server.url, "key", 3)
        closing = threading.Timer(0.2, client.close)
        closing.start()
        with pytest.raises(SamplerError, match="the sampler was closed"):
            client.get("/version", time.monotonic() + 60)
        closing.join()
        with pytest.raises(SamplerError, match="the sampler was closed"):
            client.get("/version", time.monotonic() + 60)
    assert server.left.is_set()
