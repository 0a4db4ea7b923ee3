"""A sampler behind HTTP: whom it answers, what it does not take, and what it leaves behind."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import EnvironmentProblem, SamplerError
from runner.core.rank_info import Host
from runner.sampler.remote import listening as places
from runner.sampler.remote import wire
from runner.sampler.remote.keeper import Keeper
from runner.sampler.remote.listening import Desk, Note, path_of, refuse_the_gone
from runner.sampler.remote.server import serve
from runner.sampler.remote.wire import authorization, job_token, take_token
from tests.sampler.remote.processes import TOKEN, local, samplers, until
from tests.sampler.remote.proxies import noted, running
from tests.sampler.remote.test_remotes import REQUESTS, client, drawn, in_background, shelf

__all__ = ["shelf"]


def ask(note: Note, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and answer; with the token unless it is given otherwise."""
    connection = HTTPConnection(*note.address, timeout=60)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, {"Authorization": authorization(TOKEN), **headers})
    response = connection.getresponse()
    found = response.read()
    connection.close()
    return response.status, json.loads(found) if response.headers["Content-Type"] == "application/json" else found


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Note]:
    """A sampler that has loaded nothing."""
    with samplers(tmp_path_factory.mktemp("there")) as started:
        yield started[0].note()


def test_a_sampler_answers_only_those_who_know_the_token(there: Note) -> None:
    for method, path in (("GET", "/health"), ("POST", "/sample"), ("POST", "/load")):
        for given in ("", "Bearer wrong", TOKEN, "Bearer gruß".encode().decode("latin-1")):
            status, said = ask(there, method, path, {}, Authorization=given)
            assert status == 401 and b"token" in said
    status, said = ask(there, "GET", "/health")
    held = {"version": -1, "digest": "", "session": there.session}
    assert (status, said) == (200, {"held": held, "longest": local().max_model_len, "busy": False, "waiting": 0})


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/", None, {}, 404),
        ("POST", "/health", {}, {}, 404),
        ("POST", "/sample", b"{", {}, 400),
        ("POST", "/sample", b"{}", {"Content-Length": "-3"}, 411),
        ("POST", "/sample", b"{}", {"Content-Length": str(1 << 40)}, 413),
        ("PUT", "/sample", {}, {}, 501),
    ],
)
def test_what_is_no_question_is_refused(
    method: str, path: str, body: Any, headers: dict[str, str], status: int, there: Note
) -> None:
    assert ask(there, method, path, body, **headers)[0] == status


@pytest.mark.parametrize(
    ("path", "body"), [("/load", {}), ("/sample", {}), ("/sample", {"version": 1}), ("/score", [])]
)
def test_a_question_without_sense_is_an_error_that_is_said(path: str, body: Any, there: Note) -> None:
    status, said = ask(there, "POST", path, body)
    assert status == 200 and said["error"]["kind"] in ("KeyError", "TypeError") and said["error"]["exit_code"] == 1
    assert said["held"]["version"] == -1


def test_nothing_is_drawn_under_weights_that_are_not_there(there: Note) -> None:
    _, said = ask(there, "POST", "/sample", {"version": 1, "digest": "d", "prompts": [], "requests": []})
    assert said["error"] == {"kind": "Stale", "message": "no weights is held, and version 1 is meant", "exit_code": 75}


def test_health_is_answered_while_answers_are_drawn_one_question_at_a_time(tmp_path: Path, shelf: Any) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with samplers(tmp_path, gate=gate, begun=begun) as started, client(tmp_path) as one, client(tmp_path) as other:
        one.load_weights(shelf.get(1), 1)
        other.load_weights(shelf.get(1), 1)
        gate.touch()
        first, found = in_background(lambda: one.sample(REQUESTS))
        until(begun.exists)
        second, _ = in_background(lambda: other.sample(REQUESTS[:1]))
        until(lambda: ask(started[0].note(), "GET", "/health")[1]["waiting"] == 1)
        assert ask(started[0].note(), "GET", "/health")[1]["busy"]
        other.close()  # whose question was not begun
        second.join()
        gate.unlink()
        first.join()
        assert found == [drawn(1)] and one.sample(REQUESTS[:3]) == local(1).sample(REQUESTS[:3])
    assert begun.read_text().splitlines() in (["15", "3"], ["15", "1", "3"])


def test_a_long_draw_is_heard_of_as_soon_as_it_ends(tmp_path: Path, shelf: Any) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with samplers(tmp_path, gate=gate, begun=begun), client(tmp_path) as one:
        one.load_weights(shelf.get(1), 1)
        gate.touch()
        asking, found = in_background(lambda: one.sample(REQUESTS))
        until(begun.exists)
        time.sleep(2.5)  # more than a beat
        gate.unlink()
        asking.join(15)
        assert found == [drawn(1)]


def test_a_sampler_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    with samplers(tmp_path) as started:
        note = started[0].note()
        started[0].send(signal.SIGTERM)
        started[0].process.join(30)
        assert started[0].process.exitcode == 0
    assert not path_of(tmp_path, 0).exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(note.address)


@pytest.mark.slow
def test_the_note_of_a_successor_stays(tmp_path: Path) -> None:
    with samplers(tmp_path) as started:
        note = started[0].note()
        started.append(started[0].again())
        until(lambda: Note.read(path_of(tmp_path, 0)) != note)
        started[0].send(signal.SIGTERM)
        started[0].process.join(30)
        assert Note.read(path_of(tmp_path, 0)).pid == started[1].process.pid


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

    note = Note("", Host.current(), 1, "session of a dead one")
    caplog.set_level("INFO", "runner")
    with running(HTTPServer(("127.0.0.1", 0), Stranger)) as address, client(noted(tmp_path, note, address)) as remotes:
        thread, found = in_background(lambda: remotes.load_weights(shelf.get(1), 1))
        until(lambda: ("status 401: hello" if stranger == "refuses" else "no answer: b'hello'") in caplog.text)
        with samplers(tmp_path):
            thread.join()
            assert found == [None] and remotes.sample(REQUESTS[:3]) == local(1).sample(REQUESTS[:3])


def test_notes_are_read_as_they_are_written_and_damaged_ones_said(tmp_path: Path) -> None:
    note = Note(places.url("::1", 80), Host("host", "boot"), 12, "session")
    note.write(path_of(tmp_path, 3))
    assert Note.read(tmp_path / "3.json") == note and note.address == ("::1", 80)
    for content in (b"", b"[]", b"{}", b'{"url": "http://a:1", "host": "h", "boot_id": "b", "pid": "x"}'):
        (tmp_path / "3.json").write_bytes(content)
        with pytest.raises(ValueError):
            Note.read(tmp_path / "3.json")


class Gone:
    """A sampler whose engine has lost its workers."""

    max_model_len = None

    def release_memory(self) -> None:
        raise SamplerError("vLLM's engine is gone")


def test_a_process_whose_sampler_is_gone_ends_and_no_other() -> None:
    keeper, desk = Keeper(Gone(), lambda *_: None), Desk()  # type: ignore[arg-type]
    asked = desk.ask(lambda: keeper.answer("/load", {}, "1")), desk.ask(lambda: keeper.answer("/release", {}, "2"))
    with pytest.raises(SamplerError, match="engine is gone"):
        desk.run()
    assert asked[0].result()["error"]["kind"] == "KeyError", "what is asked without sense is answered so"
    with pytest.raises(ConnectionAbortedError):
        asked[1].result()


def test_the_token_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_token", [])
    with pytest.raises(EnvironmentProblem, match="RUN_SAMPLER_TOKEN is not set"):
        job_token()
    os.environ["RUN_SAMPLER_TOKEN"] = "found"
    take_token()
    assert "RUN_SAMPLER_TOKEN" not in os.environ, "what the process starts is not to have it"
    assert job_token() == job_token() == "found"


def test_who_has_gone_is_noticed_where_many_files_are_open() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] != resource.RLIM_INFINITY and most[1] < 2048:
        pytest.skip("so many files are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most[0], 2048), most[1]))
    try:
        one, other = socket.socketpair()
        with one, other, socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD, 1500)) as high:
            high.settimeout(60)
            refuse_the_gone(high)
            other.close()
            with pytest.raises(ConnectionResetError):
                refuse_the_gone(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
