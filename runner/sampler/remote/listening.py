"""A small HTTP server: a thread for each client, the job's token, nothing printed, no name server asked."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from select import POLLIN, poll
from socket import AF_INET6, MSG_PEEK, socket
from socketserver import TCPServer
from typing import Any

from runner.sampler.remote.notes import url
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
