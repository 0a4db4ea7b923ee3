"""The processes of `run serve`: slow clients, signals, and what is left when one of them is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from runner.core.errors import EnvironmentProblem
from runner.inference.serve import read_api_keys
from tests.inference.scripted import Server, serve, write_model
from tests.launch.several import wait_until

LONG = {"model": "scripted", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "scripted")


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # other servers of the machine have theirs
    with serve(folder, "grace_s=100", cwd=tmp_path) as made:
        yield made


def ask(server: Server, body: dict[str, Any], answers: list[httpx.Response]) -> threading.Thread:
    """A request in a thread of its own."""
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/completions", json=body, timeout=200))
    )
    thread.start()
    return thread


def wait_for_requests(server: Server, count: int) -> None:
    end, url = time.monotonic() + 100, server.url.replace("/v1", "/metrics")
    while f"run_requests_in_flight {count}.0" not in httpx.get(url, timeout=60).text:
        assert time.monotonic() < end, f"{count} requests were never in flight"
        time.sleep(0.01)


def engine(server: Server) -> psutil.Process:
    [child] = psutil.Process(server.process.pid).children()
    return child


def nobody_listens(server: Server) -> bool:
    try:
        socket.create_connection(server.address, timeout=60).close()
    except OSError:
        return True
    return False


def leftovers(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").iterdir())


def test_sigterm_finishes_what_is_in_flight(server: Server, tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    with ExitStack() as slow:
        for _ in range(100):  # clients that never send a whole header
            slow.enter_context(socket.create_connection(server.address)).sendall(b"POST /v1/completions HTTP/1.1\r\nH")
        assert httpx.get(server.url.replace("/v1", "/health"), timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/models", headers={"Host": "evil.example"}, timeout=60).status_code == 400
    child = engine(server)
    child.suspend()  # or the requests may be answered before the signal
    thread = ask(server, LONG, answers)
    wait_for_requests(server, 4)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM: finishing 4 requests within 100 s" in server.printed.read_text(), server.process)
    child.resume()
    assert server.process.wait(200) == 143
    thread.join()
    [answer] = answers
    assert answer.json()["usage"]["completion_tokens"] == 2000
    assert not child.is_running() and nobody_listens(server) and not leftovers(tmp_path)


@pytest.mark.slow
def test_sigterm_while_the_model_is_loaded_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    for until_tokenizer in (False, True):  # while weights are read; while the tokenizer is
        server = subprocess.Popen(
            [sys.executable, "-m", "runner", "serve", str(folder), "port=0"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        )
        end, child = time.monotonic() + 200, list[psutil.Process]()
        while not child or (until_tokenizer and not leftovers(tmp_path)):
            assert server.poll() is None and time.monotonic() < end
            child = psutil.Process(server.pid).children()
            time.sleep(0.01)
        server.terminate()
        assert server.wait(200) == 143
        assert not child[0].is_running() and not leftovers(tmp_path)


CROWD = """
import asyncio, json, sys
host, port = sys.argv[1], int(sys.argv[2])
body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "x" * 150}], "max_tokens": 4})
head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"

async def ask(content, more=b"", count=0):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(content)
    for _ in range(count):
        writer.write(more)
        await writer.drain()
    return await reader.readline()

async def crowd():
    slow = [asyncio.create_task(ask(b"POST /v1/completions HTTP/1.1\\r\\nH")) for _ in range(100)]
    mebibyte = b"100000\\r\\n" + b" " * (1 << 20) + b"\\r\\n"
    large = ask(f"{head}Transfer-Encoding: chunked\\r\\n\\r\\n".encode(), mebibyte, 400)
    one = f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode()
    answers = await asyncio.gather(large, *(ask(one) for _ in range(1000)), return_exceptions=True)
    print(sum(isinstance(answer, bytes) and b" 200 " in answer for answer in answers[1:]))
    for task in slow:
        task.cancel()

asyncio.run(crowd())
"""


@pytest.mark.slow
def test_health_is_answered_beside_a_thousand_requests_slow_clients_and_a_large_body(server: Server) -> None:
    def health() -> float:
        start = time.monotonic()
        with socket.create_connection(server.address) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b" 200 " in connection.recv(4096)
        return time.monotonic() - start

    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)  # then seconds say nothing
    idle = sorted(health() for _ in range(100))
    host, port = server.address
    crowd = subprocess.Popen([sys.executable, "-c", CROWD, host, str(port)], stdout=subprocess.PIPE)
    beside = []
    while crowd.poll() is None:
        beside.append(health())
        time.sleep(0.02)
    assert crowd.communicate()[0].strip() == b"1000"
    beside.sort()
    median = beside[len(beside) // 2]
    found = f"idle {idle[50]:.4f} s, at most {idle[-1]:.4f} s; beside them {median:.4f} s, at most {beside[-1]:.4f} s"
    print(found)
    assert median < 20 * idle[50], found
    assert is_busy or beside[-1] < 1, found
    assert psutil.Process(server.process.pid).memory_info().rss < 2 << 30


@pytest.mark.slow
def test_an_engine_that_dies_is_a_500_and_ends_the_server(server: Server) -> None:
    answers: list[httpx.Response] = []
    child = engine(server)
    child.suspend()
    thread = ask(server, LONG, answers)
    wait_for_requests(server, 4)
    child.kill()
    assert server.process.wait(200) == 1
    thread.join()
    assert answers[0].status_code == 500
    assert answers[0].json()["error"]["type"] == "server_error"
    assert "error: the engine exited" in server.printed.read_text() and nobody_listens(server)


@pytest.mark.slow
def test_kill_9_leaves_no_process_and_no_file(server: Server, tmp_path: Path) -> None:
    answers: list[Any] = []
    child = engine(server)
    body = {**LONG, "stream": True}
    with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=100) as answer:
        answers.append(next(answer.iter_lines()))
        server.stop(signal.SIGKILL)
    end = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert nobody_listens(server) and not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prt=1"], "no setting named 'prt'; did you mean port=?"),
        (["port=x"], "port=x: expected an integer from 0 to 65535"),
        (["engine=tgi"], "engine=tgi: expected one of auto, torch, vllm"),
        (["host=0.0.0.0"], "host=0.0.0.0: other machines could use the model without a key"),
        (["weight_updates=true"], "weight_updates=true: anyone who reaches the server could replace its model"),
        (["weight_updates=1"], "weight_updates=1: expected true or false"),
        (["--api-key-file", "none"], "--api-key-file none: cannot be read"),
        (["engine=torch", "--", "--max-model-len"], "--max-model-len: words after -- are for engine=vllm"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_loaded(
    folder: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.cli.main import main

    assert main(["serve", str(folder), "device=cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_vllm_does_not_replace_weights_where_other_machines_reach_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.cli.main import main

    (key := tmp_path / "key").write_text("k")
    key.chmod(0o600)
    words = ["device=cpu", "engine=vllm", "host=192.0.2.1", "weight_updates=true", "--api-key-file", str(key)]
    assert main(["serve", str(folder), *words]) == 2
    assert "vLLM replaces weights without a key; type engine=torch, or host=127.0.0.1" in capsys.readouterr().err


def test_a_key_file_has_one_key(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.cli.main import main

    key = tmp_path / "key"
    key.write_bytes(b"\xef\xbb\xbfsecret\n")
    key.chmod(0o600)
    assert read_api_keys(key, "--api-key-file") == ["secret"], "a byte-order mark is no part of it"
    key.chmod(0o640)
    with pytest.raises(EnvironmentProblem, match="other users can read it"):
        read_api_keys(key, "--api-key-file")
    monkeypatch.setattr("os.getuid", lambda: key.stat().st_uid + 1)  # a secret of Kubernetes with fsGroup is root's
    assert read_api_keys(key, "--api-key-file") == ["secret"]
    key.chmod(0o644)
    with pytest.raises(EnvironmentProblem, match="other users can read it"):
        read_api_keys(key, "--api-key-file")
    key.chmod(0o640)
    key.write_text("two words")
    assert main(["serve", str(folder), "device=cpu", "--api-key-file", str(key)]) == 2
    assert "expected one key" in capsys.readouterr().err
    key.write_bytes(b"\xff")
    with pytest.raises(EnvironmentProblem, match="not UTF-8"):
        read_api_keys(key, "--api-key-file")
