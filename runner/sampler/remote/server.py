"""A sampler behind HTTP: what a process runs that only samples.

GET /health ─▶ at once     POST /load, /sample, /score, /release ─▶ one after another, a line feed each second meanwhile

Each line feed says that the process lives; the answer, one line of JSON (`wire.py`), follows them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from pathlib import Path
from select import select
from socket import MSG_PEEK
from typing import NoReturn

from runner.errors import EnvironmentProblem
from runner.protocols import Sampler
from runner.sampler.remote.desk import Desk
from runner.sampler.remote.keeper import Keeper
from runner.sampler.remote.listening import Handler, Listening
from runner.sampler.remote.notes import Machine, Note, path_of, url
from runner.sampler.remote.wire import BEAT_S, LARGEST_BYTES, Json

log = logging.getLogger("runner")


def serve(sampler: Sampler, index: int, notes: Path, *, token: str, host: str = "127.0.0.1", port: int = 0) -> NoReturn:
    """Serve `sampler` as number `index` of a job's, until something is raised in this thread, which alone uses it.

    notes: the folder in which clients look for samplers; token: what they have to name; host: the address of this
    machine to listen at, and at which clients reach it; port: 0 = any that is free.
    Raises EnvironmentProblem where the address cannot be had, OSError where the note cannot be written.
    """
    desk, keeper = Desk(), Keeper(sampler, token)
    with closing(sampler), closing(keeper), _bound(desk, keeper, token, host, port) as server, server.running():
        note = Note(server.url, Machine.here(), os.getpid(), keeper.held.session)
        with _noted(path_of(notes, index), note):
            log.info("sampler %d listens at %s", index, server.url)
            desk.run()


def _bound(desk: Desk, keeper: Keeper, token: str, host: str, port: int) -> _Server:
    try:
        return _Server(desk, keeper, token, host, port)
    except OSError as error:
        text = f"a sampler cannot listen at {url(host, port)}: {error.strerror}"
        raise EnvironmentProblem(f"{text}; an address of this machine and a free port are needed") from error


@contextmanager
def _noted(path: Path, note: Note) -> Iterator[None]:
    """While this process can be asked, its note is there; a successor's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        note.write(path)
        yield
    finally:
        if path.exists() and Note.read(path) == note:
            path.unlink()


class _Server(Listening):
    def __init__(self, desk: Desk, keeper: Keeper, token: str, host: str, port: int) -> None:
        self.desk, self.keeper = desk, keeper
        super().__init__(host, port, token, _Handler)


class _Handler(Handler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer at once, whatever the sampler is doing."""
        if not self.known():
            return
        if self.path != "/health":
            return self._say(404, {"error": f"{self.path}: GET /health is answered"})
        desk = self.server.desk
        self._say(200, self.server.keeper.health() | {"busy": desk.busy, "waiting": desk.waiting})

    def do_POST(self) -> None:
        """Hand it to the sampler's thread, and say that this process lives until that is done."""
        keeper, verb = self.server.keeper, self.path
        if not self.known():
            return
        if verb not in keeper.verbs:
            return self._say(404, {"error": f"{verb}: {', '.join(keeper.verbs)} are answered"})
        content = self._content()
        if content is None:
            return
        try:
            body = json.loads(content)
        except ValueError as error:
            return self._say(400, {"error": f"no JSON: {error}"})
        key = f"{verb} {hashlib.blake2b(content).hexdigest()}"
        self._follow(self.server.desk.ask(lambda: keeper.answer(verb, body, key)))

    def _follow(self, future: Future[Json]) -> None:
        """A sign of life each second, then the answer. A client that goes before its turn comes has not asked."""
        try:
            self.head(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
            while not wait([future], BEAT_S).done:
                self._refuse_the_gone()
                self._chunk(b"\n")
            self._chunk(json.dumps(future.result()).encode() + b"\n")
            self._chunk(b"")
        except OSError:
            future.cancel()
            raise

    def _refuse_the_gone(self) -> None:
        """Raise where the client has closed its end, which writing to it tells only later."""
        readable, _, _ = select([self.connection], [], [], 0)  # recv itself would wait for as long as the time-out is
        if readable and self.connection.recv(1, MSG_PEEK) == b"":
            raise ConnectionResetError("the client does not wait for its answer")

    def _content(self) -> bytes | None:
        """What was sent; None after a refusal."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._say(411, {"error": "a length is needed"})
        elif int(length) > LARGEST_BYTES:
            self._say(413, {"error": f"above {LARGEST_BYTES} bytes"})
        elif len(content := self.rfile.read(int(length))) < int(length):
            self._say(400, {"error": f"{len(content)} of {length} bytes arrived"})
        else:
            return content
        return None

    def _say(self, status: int, body: Json) -> None:
        self.say(status, json.dumps(body).encode(), "application/json")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
