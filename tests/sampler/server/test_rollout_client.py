"""What a server that falls silent leaves behind in its client's process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core.errors import SamplerError
from runner.sampler.server.pool import SamplerPool
from runner.sampler.server.protocol import Endpoint, endpoint_path
from tests.sampler.server.processes import CONFIG

BEGINNING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n\n\r\n"


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """The folder of a server that begins each answer, and sends no more."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                held.append(connection)
                connection.sendall(BEGINNING)

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        Endpoint(f"http://127.0.0.1:{port}", os.getpid(), "s").write(endpoint_path(tmp_path, 0))
        yield tmp_path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for one in held:
        one.close()


def test_a_connection_does_not_live_as_long_as_the_error_that_it_ends_with(
    silent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")  # what is logged of it is kept, too
    config = CONFIG.model_copy(update={"timeout_s": 0.5})
    pool = SamplerPool(config, 1, silent, token="token", vocab_size=5, silence_s=0.1)
    with pytest.raises(SamplerError, match="did not respond in") as raised:
        pool.release_memory()
    port = int(Endpoint.read(endpoint_path(silent, 0)).url.rpartition(":")[2])
    assert raised.value is not None and connected(port) == 0


def connected(port: int) -> int:
    """Sockets of this process whose other side is at a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    there = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}")}
    return sum(os.readlink(path) in there for path in Path("/proc/self/fd").iterdir() if path.exists())
