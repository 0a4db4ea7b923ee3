"""Where a process of a job is asked over HTTP: at once how it is, and in their turn what its verbs do; and how long
that is waited for.

GET /health ─▶ at once     POST VERB ─▶ the process, in its own time, a line feed each second meanwhile

Each line feed says that the process lives; the answer, one line of JSON (`wire.py`), follows them. Another thread can
break the waiting off. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.core.bounded_text import parse_json
from runner.core.errors import EnvironmentProblem, SamplerError
from runner.core.rank_info import Host
from runner.sampler.remote.listening import Handler, Listening, Note, refuse_the_gone, url
from runner.sampler.remote.wire import BEAT_S, LARGEST_BYTES, Json


class Patience:
    """A deadline for all that is done under it, by several threads, until it is given up."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def left(self) -> float:
        """Seconds that are left, 0 after the end. Raises SamplerFault once it was given up."""
        if self._over.is_set():
            raise SamplerError("samplers are not waited for any more")
        return max(self._end - time.monotonic(), 0.0)

    def pause(self, seconds: float) -> None:
        """Sleep so long, at most to the end. Raises SamplerFault once it was given up."""
        self._over.wait(min(seconds, self.left()))
        self.left()

    def give_up(self) -> None:
        """Break off whatever waits."""
        self._over.set()
        with self._lock:
            for one in self._open:
                with suppress(OSError):  # the other side was faster
                    one.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def over(self, connection: socket.socket) -> Iterator[None]:
        """A connection that is cut where this is given up."""
        with self._lock:
            self._open.add(connection)
        try:
            self.left()  # it may have been given up before it was known of
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


log = logging.getLogger("runner")


@dataclass(frozen=True, slots=True)
class Window:
    """What clients may ask of a process, and who answers, in whichever thread that is.

    session: drawn anew by every process; health: what can be said at once; ask: a verb, what was sent with it, and a
    key, the same where the same is asked again ─▶ the answer to come
    """

    session: str
    verbs: Collection[str]
    health: Callable[[], Json]
    ask: Callable[[str, Json, str], Future[Json]]


@contextmanager
def offered(window: Window, path: Path, *, token: str, host: str, port: int = 0) -> Iterator[None]:
    """While the block runs, those who find the note at `path` and name the token are answered; see `serve`."""
    with _bound(window, token, host, port) as server, server.running():
        log.info("listens at %s", server.url)
        with _noted(path, Note(server.url, Host.current(), os.getpid(), window.session)):
            yield


def _bound(window: Window, token: str, host: str, port: int) -> _Server:
    try:
        return _Server(window, token, host, port)
    except OSError as error:
        text = f"cannot listen at {url(host, port)}: {error.strerror}"
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
    def __init__(self, window: Window, token: str, host: str, port: int) -> None:
        self.window = window
        super().__init__(host, port, token, _Handler)


class _Handler(Handler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer at once, whatever the process is doing."""
        if not self.known():
            return
        if self.path != "/health":
            return self._say(404, {"error": f"{self.path}: GET /health is answered"})
        self._say(200, self.server.window.health())

    def do_POST(self) -> None:
        """Hand it over, and say that this process lives until it is done."""
        window, verb = self.server.window, self.path
        if not self.known():
            return
        if verb not in window.verbs:
            return self._say(404, {"error": f"{verb}: {', '.join(window.verbs)} are answered"})
        content = self._content()
        if content is None:
            return
        try:
            body = parse_json(content)
        except ValueError as error:
            return self._say(400, {"error": f"no JSON: {error}"})
        key = f"{verb} {hashlib.blake2b(content).hexdigest()}"
        self._follow(window.ask(verb, body, key))

    def _follow(self, future: Future[Json]) -> None:
        """A sign of life each second, then the answer. A client that goes before its turn comes has not asked."""
        try:
            self.head(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
            while not wait([future], BEAT_S).done:
                refuse_the_gone(self.connection)
                self._chunk(b"\n")
            self._chunk(json.dumps(future.result()).encode() + b"\n")
            self._chunk(b"")
        except OSError:
            future.cancel()
            raise

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
