"""How a sampler is reached: a small HTTP server, the queue behind it, and the file that says where it is.

    threads of clients ──ask──▶ queue ──one piece after another──▶ the thread that `run` was called in
    samplers/0.json   {"url": "http://127.0.0.1:40123", "host": …, "boot_id": …, "pid": …, "session": …}

The server has a thread for each client, asks for the job's token, prints nothing and asks no name server. Each sampler
writes its own file once it can be asked.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from select import POLLIN, poll
from socket import AF_INET6, MSG_PEEK, socket
from socketserver import TCPServer
from typing import Any, NoReturn
from urllib.parse import urlsplit

from runner.core import fsync_io
from runner.core.errors import SamplerError
from runner.core.rank_info import Host
from runner.sampler.remote.wire import authorization

SILENCE_S = 60.0  # of a client in the middle of something
log = logging.getLogger("runner")


class Listening(ThreadingHTTPServer):
    """Listens at one address, for those who know the token."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, token: str, handler: type[Handler]) -> None:
        """Raises OSError where the address cannot be had."""
        self.expected = authorization(token).encode()
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), handler)
        self.url = url(host, self.server_address[1])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answer while the block runs, then listen no more."""
        with self:
            thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="http", daemon=True)
            thread.start()
            try:
                yield
            finally:
                self.shutdown()
                thread.join()

    def server_bind(self) -> None:
        """Bind; http.server would ask a name server for this machine's name, which may take long."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no fault of this process; anything else is found in the log."""
        log.info("the connection to %s broke", client_address[0], exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One connection, of one question."""

    server: Listening
    timeout = SILENCE_S

    def known(self) -> bool:
        """Whether the client named the token; it is told where it did not."""
        if hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.server.expected):
            return True
        self.say(401, b"the token of the job is needed\n", "text/plain")
        return False

    def say(self, status: int, content: bytes, kind: str, *, last: bool = True) -> None:
        """A whole answer. last: the connection ends after it."""
        self.head(status, {"Content-Type": kind, "Content-Length": str(len(content))}, last=last)
        self.wfile.write(content)

    def head(self, status: int, headers: dict[str, str], *, last: bool = True) -> None:
        """How an answer begins."""
        self.send_response(status)
        for name, value in {**headers, **({"Connection": "close"} if last else {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Each question, for those who look for something."""
        log.debug(format, *args)


def refuse_the_gone(connection: socket) -> None:
    """Raise ConnectionResetError where the other side has closed its end, which writing to it tells only later."""
    readable = poll()  # recv itself would wait for as long as the time-out is
    readable.register(connection, POLLIN)
    if readable.poll(0) and connection.recv(1, MSG_PEEK) == b"":
        raise ConnectionResetError("the other side has gone")


Work = Callable[[], dict[str, Any]]


class Desk:
    """What a sampler is asked for. A model's device, thread pool and modes belong to the thread that built it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[dict[str, Any]], Work]] = SimpleQueue()
        self.busy = False

    @property
    def waiting(self) -> int:
        """Pieces of work that have not begun."""
        return self._queue.qsize()

    def ask(self, work: Work) -> Future[dict[str, Any]]:
        """Hand in a piece of work. Cancelled before it begins, it is never done."""
        future: Future[dict[str, Any]] = Future()
        self._queue.put((future, work))
        return future

    def run(self) -> NoReturn:
        """Do what is handed in, for ever: until something is raised here that is no Exception, or a SamplerFault."""
        while True:
            future, work = self._queue.get()
            if future.set_running_or_notify_cancel():
                self._do(future, work)

    def _do(self, future: Future[dict[str, Any]], work: Work) -> None:
        self.busy = True
        try:
            future.set_result(work())
        except BaseException as error:
            ends = isinstance(error, SamplerError) or not isinstance(error, Exception)
            future.set_exception(ConnectionAbortedError("the sampler ends") if ends else error)
            if ends:
                raise
        finally:
            self.busy = False


@dataclass(frozen=True, slots=True)
class Note:
    """Where a sampler listens, on which machine, and which process it is."""

    url: str
    machine: Host
    pid: int
    session: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def write(self, path: Path) -> None:
        """Put it where a client looks for it, whole or not at all. Raises OSError."""
        content = {"url": self.url, **asdict(self.machine), "pid": self.pid, "session": self.session}
        fsync_io.atomic_write(path, json.dumps(content).encode())

    @classmethod
    def read(cls, path: Path) -> Note:
        """The note of a sampler. Raises OSError where there is none, ValueError for what is none."""
        try:
            found = json.loads(path.read_bytes())
            machine = Host(str(found["host"]), str(found["boot_id"]))
            return cls(str(found["url"]), machine, int(found["pid"]), str(found["session"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} does not say where a sampler is: {error}") from error


def path_of(folder: Path, index: int) -> Path:
    """The file of sampler `index`."""
    return folder / f"{index}.json"


def url(host: str, port: int) -> str:
    """The address as it is typed."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
