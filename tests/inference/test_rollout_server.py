"""A sampler behind HTTP: whom it answers, what it does not take, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import EnvironmentProblem, SamplerError
from runner.inference.rollout_server import RolloutServer, serve
from runner.sampler.server import job_token as tokens
from runner.sampler.server.job_token import job_token, take_token
from runner.sampler.server.protocol import (
    LOAD,
    PROTOCOL,
    RELEASE,
    SAMPLE,
    SCORE,
    Endpoint,
    decode,
    encode,
    encode_requests,
    endpoint_path,
)
from tests.sampler.server.processes import TOKEN, local, samplers, until
from tests.sampler.server.proxies import address_of, redirect, running
from tests.sampler.server.test_pool import REQUESTS, client, drawn, in_background, shelf

__all__ = ["shelf"]


def ask(endpoint: Endpoint, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body; with the token unless it is given otherwise."""
    connection = HTTPConnection(*address_of(endpoint), timeout=60)
    connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", **headers})
    response = connection.getresponse()
    found = response.read()
    connection.close()
    return response.status, found


def health(endpoint: Endpoint) -> Any:
    return json.loads(ask(endpoint, "GET", "/health")[1])


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A server that has loaded nothing."""
    with samplers(tmp_path_factory.mktemp("there")) as started:
        yield started[0].endpoint()


def test_a_sampler_answers_only_those_who_know_the_token(there: Endpoint) -> None:
    for method, path in (("GET", "/health"), ("POST", SAMPLE), ("POST", LOAD), ("PUT", "/weights/a")):
        for given in ("", "Bearer wrong", TOKEN, "Bearer gruß".encode().decode("latin-1")):
            status, text = ask(there, method, path, b"{}", Authorization=given)
            assert status == 401 and b"token" in text
    held = {"version": -1, "digest": "", "session": there.session}
    longest = local().max_model_len
    known = {"protocol": PROTOCOL, "held": held, "max_model_len": longest, "busy": False, "waiting": 0}
    assert health(there) == known


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/", None, {}, 404),
        ("POST", "/health", b"{}", {}, 405),
        ("POST", SAMPLE, b"{", {}, 400),
        ("POST", SAMPLE, b"{}", {"Content-Length": "-3"}, 400),
        ("POST", SAMPLE, b"{}", {"Content-Length": str(1 << 41)}, 413),
        ("PUT", SAMPLE, b"{}", {}, 405),
        ("PUT", "/weights/a", b"abc", {}, 400),
        ("PUT", "/weights/a?size=4&mtime_ns=1", b"abc", {}, 400),
        ("PUT", "/weights/a?size=x&mtime_ns=1", b"abc", {}, 400),
    ],
)
def test_what_is_no_request_is_refused(
    method: str, path: str, body: bytes | None, headers: dict[str, str], status: int, there: Endpoint
) -> None:
    assert ask(there, method, path, body, **headers)[0] == status


@pytest.mark.parametrize(("path", "header"), [(LOAD, {}), (SAMPLE, {}), (SAMPLE, {"version": 1}), (SCORE, {})])
def test_a_request_without_sense_is_an_error_in_words(path: str, header: dict[str, Any], there: Endpoint) -> None:
    status, body = ask(there, "POST", path, encode(header))
    found, _ = decode(body)
    assert status == 200 and found["error"]["kind"] == "KeyError" and found["error"]["exit_code"] == 1
    assert found["held"]["version"] == -1


def test_nothing_is_sampled_under_weights_that_are_not_there(there: Endpoint) -> None:
    _, body = ask(there, "POST", SAMPLE, encode_requests([], {"version": 1, "digest": "d"}))
    error = {
        "kind": "StaleWeights",
        "message": "this server has no weights, but version 1 was requested",
        "exit_code": 75,
    }
    assert decode(body)[0]["error"] == error


def test_health_is_answered_while_answers_are_drawn_one_question_at_a_time(tmp_path: Path, shelf: Any) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with samplers(tmp_path, gate=gate, begun=begun) as started, client(tmp_path) as one, client(tmp_path) as other:
        one.load_weights(shelf.get(1), 1)
        other.load_weights(shelf.get(1), 1)
        gate.touch()
        first, found = in_background(lambda: one.sample(REQUESTS))
        until(begun.exists)
        second, _ = in_background(lambda: other.sample(REQUESTS[:1]))
        until(lambda: health(started[0].endpoint())["waiting"] == 1)
        assert health(started[0].endpoint())["busy"]
        other.close()  # whose question was not begun
        second.join()
        gate.unlink()
        first.join()
        assert found == [drawn(1)] and one.sample(REQUESTS[:3]) == local(1).sample(REQUESTS[:3])
    assert begun.read_text().splitlines() in (["15", "3"], ["15", "1", "3"])


def test_a_long_draw_is_heard_of_as_soon_as_it_ends(tmp_path: Path, shelf: Any) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with samplers(tmp_path, gate=gate, begun=begun), client(tmp_path, silence_s=600) as one:
        one.load_weights(shelf.get(1), 1)
        gate.touch()
        asking, found = in_background(lambda: one.sample(REQUESTS))
        until(begun.exists)
        time.sleep(2.5)  # more than a beat
        gate.unlink()
        asking.join(100)
        assert found == [drawn(1)]


def test_a_sampler_leaves_nothing_at_sigterm(tmp_path: Path) -> None:
    with samplers(tmp_path) as started:
        endpoint = started[0].endpoint()
        started[0].send(signal.SIGTERM)
        started[0].process.join(200)
        assert started[0].process.exitcode == 0
    assert not endpoint_path(tmp_path, 0).exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address_of(endpoint))


@pytest.mark.slow
def test_the_endpoint_file_of_a_successor_stays(tmp_path: Path) -> None:
    with samplers(tmp_path) as started:
        endpoint = started[0].endpoint()
        started.append(started[0].again())
        until(lambda: Endpoint.read(endpoint_path(tmp_path, 0)) != endpoint)
        started[0].send(signal.SIGTERM)
        started[0].process.join(200)
        assert Endpoint.read(endpoint_path(tmp_path, 0)).pid == started[1].process.pid


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EnvironmentProblem, match=f"cannot listen at http://127.0.0.1:{port}: Address already in use"
        ):
            serve(local(), 0, tmp_path, token=TOKEN, port=port)
    with pytest.raises(EnvironmentProblem, match="an address of this machine"):
        serve(local(), 0, tmp_path, token=TOKEN, host="192.0.2.1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("stranger", ["refuses", "babbles"])
def test_a_stranger_on_the_port_of_a_dead_sampler_is_not_taken_for_it(
    stranger: str, tmp_path: Path, shelf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(401 if stranger == "refuses" else 200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    dead = Endpoint("", 1, "session of a dead one")
    caplog.set_level("INFO", "runner")
    with running(HTTPServer(("127.0.0.1", 0), Stranger)) as address, client(redirect(tmp_path, dead, address)) as pool:
        thread, found = in_background(lambda: pool.load_weights(shelf.get(1), 1))
        until(lambda: ("status 401: hello" if stranger == "refuses" else "cannot be read: b'hello'") in caplog.text)
        with samplers(tmp_path, begun=tmp_path / "begun"):
            thread.join()
            assert found == [None]
            sampled = pool.sample(REQUESTS[:3])
            assert (tmp_path / "begun").read_text() == "3\n", "all three in one call, as here"
            assert sampled == local(1).sample(REQUESTS[:3])


def test_endpoint_files_are_read_as_they_are_written_and_damaged_ones_named(tmp_path: Path) -> None:
    endpoint = Endpoint("http://[::1]:80", 12, "session")
    endpoint.write(endpoint_path(tmp_path, 3))
    assert Endpoint.read(tmp_path / "3.json") == endpoint
    for content in (b"", b"[]", b"{}", b'{"url": "http://a:1", "session": "s", "pid": "x"}'):
        (tmp_path / "3.json").write_bytes(content)
        with pytest.raises(ValueError):
            Endpoint.read(tmp_path / "3.json")


class Gone:
    """A sampler whose engine has lost its workers."""

    max_model_len = None

    def release_memory(self) -> None:
        raise SamplerError("vLLM's engine died")


def test_a_process_whose_sampler_is_gone_ends_and_no_other() -> None:
    server = RolloutServer(Gone(), TOKEN)  # type: ignore[arg-type]
    assert decode(server._answer(LOAD, {}, (), "1"))[0]["error"]["kind"] == "KeyError"
    future: Future[bytes] = Future()
    server._queue.put((future, lambda: server._answer(RELEASE, {}, (), "2")))
    with pytest.raises(SamplerError, match="engine died"):
        server.run()
    with pytest.raises(ConnectionAbortedError):
        future.result()


def test_the_token_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_token", [])
    with pytest.raises(EnvironmentProblem, match="RUN_SAMPLER_TOKEN is not set"):
        job_token()
    os.environ["RUN_SAMPLER_TOKEN"] = "found"
    take_token()
    assert "RUN_SAMPLER_TOKEN" not in os.environ, "what the process starts is not to have it"
    assert job_token() == job_token() == "found"
