"""A reward service on this machine: what it is sent, and every way in which it can fail to answer."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from runner.core.errors import EnvironmentProblem
from runner.reward.config import HttpConfig
from tests.dripping import ENOUGH_S, WAYS, dripping
from tests.ports import free_port
from tests.reward.samples import answer, made

ROOT = Path(__file__).resolve().parents[2]
Reply = tuple[int, bytes | Any]
FAST: dict[str, Any] = {"backoff_s": 0.01, "timeout_s": 100.0, "retries": 2}
GROUP = [answer("4", answer="4"), answer("5", answer="4")]


@contextmanager
def service(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, requests so far) of a server that answers with (status, bytes or JSON)."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(content | {"path": self.path})
            status, body = reply(content)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score?v=1", asked
    finally:
        server.shutdown()
        server.server_close()


def scored(url: str, *groups: Any, **options: Any) -> list[list[float | None]]:
    reward = made(HttpConfig(url=url, **FAST | options))
    try:
        return reward.score(groups or [GROUP])
    finally:
        reward.close()


def test_a_group_is_one_request_and_scores_come_in_order() -> None:
    def lengths(content: dict[str, Any]) -> Reply:
        time.sleep(0.05 if content["completions"] == ["0"] else 0)  # the first answer comes last
        return 200, {"scores": [float(c) for c in content["completions"]]}

    with service(lengths) as (url, asked):
        groups = [[answer(str(i), answer="x")] for i in range(8)]
        assert scored(url, *groups, []) == [[float(i)] for i in range(8)] + [[]]
        assert len(asked) == 8
        expected = {
            "path": "/score?v=1",
            "prompts": ["2+2?"],
            "completions": ["0"],
            "completion_ids": [[0, 1, 2]],
            "columns": {"answer": ["x"]},
        }
        assert expected in asked


@pytest.mark.parametrize(
    ("body", "scores", "said"),
    [
        ([1, None], [1, None], None),
        ({"scores": [1, 0.5]}, [1, 0.5], None),
        ({"scores": [1]}, [None, None], "expected 2 scores"),
        ({"score": [1, 2]}, [None, None], "expected a list of 2 scores, got None"),
        (b'{"scores": [NaN, 1]}', [None, 1], "score 1 of 2 is nan"),
        (b"<html>", [None, None], "the response is not JSON"),
        (b"", [None, None], "the response is not JSON"),
    ],
)
def test_answers(body: Any, scores: list[float | None], said: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with service(lambda _: (200, body)) as (url, asked):
        assert scored(url) == [scores]
    assert len(asked) == 1  # what was answered is not asked again
    assert (said in caplog.text) if said else not caplog.records


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (503, 3), (429, 3), (404, 1), (302, 1), (204, 1)])
def test_a_bad_status_is_tried_again_only_where_that_may_help(
    status: int, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    with service(lambda _: (status, b"" if status == 204 else b"no way")) as (url, asked):
        assert scored(url) == [[None, None]]
    assert len(asked) == tries and f"status {status}" in caplog.text
    assert f"2 of 2 samples could not be scored: 2 × status {status}" in caplog.text


def test_a_service_that_recovers_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    replies = iter([(503, b""), (500, b""), (200, [1, 0])])
    with service(lambda _: next(replies)) as (url, _):
        assert scored(url) == [[1, 0]]
    assert caplog.records == []


def test_waits_double() -> None:
    begin = time.monotonic()
    with service(lambda _: (500, b"")) as (url, _):
        assert scored(url, backoff_s=0.05, retries=3) == [[None, None]]
    assert time.monotonic() - begin >= 0.05 + 0.1 + 0.2


@WAYS
def test_a_service_that_takes_too_long_has_no_score(sent: bytes, drop: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with dripping(sent, drop) as server:
        assert scored(server.url, timeout_s=0.2, retries=0) == [[None, None]]
    assert server.left.is_set() and "no response (TimeoutError)" in caplog.text


@WAYS
def test_all_tries_together_end_in_time(sent: bytes, drop: bytes) -> None:
    with dripping(sent, drop) as server:
        begin = time.monotonic()
        assert scored(server.url, timeout_s=0.3, retries=2, backoff_s=0.01) == [[None, None]]
        assert time.monotonic() - begin < ENOUGH_S


def test_a_connection_that_nobody_accepts_ends_in_time(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # of which the kernel answers one connection, and no further one
        for other in (first, second):
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        begin = time.monotonic()
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        assert scored(url, timeout_s=0.3, retries=2, backoff_s=0.01) == [[None, None]]
        assert 0.8 < time.monotonic() - begin < ENOUGH_S
    assert "no complete response within 0.3 s" in caplog.text


def test_the_program_does_not_wait_at_its_end_for_a_name_lookup() -> None:
    program = (
        "import socket, time\nsocket.getaddrinfo = lambda *a, **k: time.sleep(1000)\n"
        "from runner.core.http_client import request, run_coroutine\n"
        "try:\n  run_coroutine(request('GET', 'http://rewards.test', timeout_s=0.2, largest_bytes=0))\n"
        "except TimeoutError:\n  print('late')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr


def test_an_answer_of_brackets_alone_is_no_json(caplog: pytest.LogCaptureFixture) -> None:
    with service(lambda content: (200, b"[" * 200_000)) as (url, asked):
        assert scored(url) == [[None, None]] and len(asked) == 1
    assert "the response is not JSON: nested too deeply" in caplog.text


def test_a_name_lookup_ends_with_the_timeout(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answered, ended = Event(), Event()

    def look_up(*_: Any, **__: Any) -> Any:
        answered.wait(200)
        ended.set()
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        assert scored("http://rewards.test:80", timeout_s=0.1, retries=0) == [[None, None]]
        assert not ended.is_set() and "no complete response within 0.1 s" in caplog.text
    finally:
        answered.set()


def test_a_failed_connection_is_described_by_its_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with service(lambda _: (200, [1, 1])) as (url, _):
        assert scored(url.replace("http:", "https:"), retries=0) == [[None, None]]
    assert "ssl" in caplog.text.lower() and "Operation not permitted" not in caplog.text

    def look_up(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert scored("http://rewards.test:80", retries=0) == [[None, None]]
    assert "Name or service not known" in caplog.text and "Unknown error" not in caplog.text


def test_the_service_of_the_page_scores(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    code, port = page.split("```python\n# reward_service.py\n")[1].split("```")[0], free_port()
    (tmp_path / "reward_service.py").write_text(code)
    command = [sys.executable, "reward_service.py", "127.0.0.1", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            chat = [answer("4", messages=[{"role": "user", "content": "2+2?"}], answer="4")]
            found = scored(f"http://127.0.0.1:{port}", GROUP, chat, retries=9, backoff_s=0.05)
            assert found == [[1.0, 0.0], [1.0]]
        finally:
            process.kill()


def test_a_service_that_is_not_there_stops_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        EnvironmentProblem, match=r"(?s)no sample of 2 groups in a row .*Connection refused.*reward\.url"
    ):
        scored(f"http://127.0.0.1:{port}", *[GROUP] * 3, retries=0, max_failures=2)


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://localhost:8000/score", True),
        ("https://rewards.example/v1?x=1", True),
        ("localhost:8000", False),
        ("ftp://host/x", False),
        ("http://", False),
        ("http://host:port/", False),
        ("http://host/a b", False),
        ("http://[::1", False),
        ("http://me:secret@host/", False),
    ],
)
def test_an_address_is_checked_with_the_spec(url: str, good: bool) -> None:
    assert [key for key, _ in HttpConfig(url=url).problems(None)] == ([] if good else ["reward.url"])
