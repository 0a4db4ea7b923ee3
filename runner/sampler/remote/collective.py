"""Weights by collective: the same files as over HTTP, whose bytes go through a pair (`pair.py`) instead.

sampler                                     rank 0
GET /pair ────────────────────────────────▶ opens a store, says its port      both then form the pair
HEAD /…/v7-0000.safetensors ──────────────▶ its size, and then the bytes through the pair, one sampler at a time

Both are asked on one connection, which stays: it is how either side notices at once that the other is gone.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor

from runner.sampler.remote.backends import Collectives, hosted, joined
from runner.sampler.remote.fetch import Get, over_http
from runner.sampler.remote.listening import SILENCE_S, refuse_the_gone
from runner.sampler.remote.offer import FileHandler, Server
from runner.sampler.remote.pair import Pair, stages_on
from runner.sampler.remote.wire import authorization

PAIR = "/pair"
CLOSE_S = 5.0  # for pairs to be given up
TURN_S = 45.0  # for other samplers; one that was stopped is given up before (STALL_S), and who asks waits for SILENCE_S
log = logging.getLogger("runner")


@contextmanager
def getting(token: str, own: str, collectives: Collectives | None) -> Iterator[Get]:
    """How a sampler at the address `own` gets files of rank 0's: None = over HTTP."""
    if collectives is None:
        yield partial(over_http, token)
        return
    side = Joined(token, own, collectives)
    try:
        yield side.get
    finally:
        side.close()


class Joined:
    """The sampler's side, which forms a pair when it first needs one, and another after whatever has gone wrong."""

    def __init__(self, token: str, own: str, collectives: Collectives) -> None:
        self._headers, self._own, self._collectives = {"Authorization": authorization(token)}, own, collectives
        self._with: tuple[HTTPConnection, Pair] | None = None
        self._lock = threading.Lock()

    def get(self, url: str, handle: int) -> None:
        """`Get`, of a file that is mapped meanwhile."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
        with self._lock:
            try:
                line, pair = self._formed(host, port)
                size = int(self._asked(line, "HEAD", parts.path)[0])
                os.ftruncate(handle, size)
                pair.move(_mapped(handle, mmap.ACCESS_WRITE), partial(refuse_the_gone, line.sock))
            except _BusyError:
                raise  # the pair is as good as before
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Give the pair up, if there is one."""
        if self._with is not None:
            line, pair = self._with
            self._with = None
            line.close()
            pair.give_up()

    def _formed(self, host: str, port: int) -> tuple[HTTPConnection, Pair]:
        if self._with is not None and (self._with[0].host, self._with[0].port) != (host, port):
            self.close()  # rank 0 is another one
        if self._with is None:
            stages = stages_on(self._collectives.device)
            line = HTTPConnection(host, port, timeout=SILENCE_S)
            try:
                store = int(self._asked(line, "GET", PAIR)[1])
                pair = Pair(self._collectives, 1, partial(joined, host, store), self._own, stages)
            except BaseException:
                line.close()
                raise
            self._with = line, pair
        return self._with

    def _asked(self, line: HTTPConnection, method: str, path: str) -> tuple[str, bytes]:
        """The length that the answer names, and the answer. Raises OSError, HTTPException, _BusyError of these."""
        line.request(method, path, headers=self._headers)
        response = line.getresponse()
        content = response.read()
        if response.status == 503:
            raise _BusyError("others are sent weights")
        if response.status != 200:
            raise HTTPException(f"status {response.status}")
        return response.headers["Content-Length"], content


class _BusyError(HTTPException):
    """Rank 0 is to be asked again, on the same connection."""


class PairServer(Server):
    """Rank 0's side: a pair for each connection that asks for one."""

    def __init__(self, collectives: Collectives, host: str, token: str, files: dict[str, Path]) -> None:
        """Raises OSError where the address cannot be had, OutOfMemory."""
        self.collectives, self.host = collectives, host
        self.turn = threading.Lock()  # of one transfer: the network card is one
        self.stages = stages_on(collectives.device)  # of whose turn it is
        self.lines: set[socket.socket] = set()
        super().__init__(host, token, files, _PairHandler)

    def server_close(self) -> None:
        """End all pairs, too."""
        super().server_close()
        for line in list(self.lines):
            with suppress(OSError):  # the other side was faster
                line.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + CLOSE_S
        while self.lines and time.monotonic() < end:
            time.sleep(0.01)


class _PairHandler(FileHandler):
    """One connection, and its pair."""

    server: PairServer
    protocol_version = "HTTP/1.1"
    pair: Pair | None = None

    def setup(self) -> None:
        super().setup()
        self.server.lines.add(self.connection)

    def finish(self) -> None:
        if self.pair is not None:
            self.pair.give_up()
        self.server.lines.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        """Form a pair with who asks."""
        if not self.known():
            return
        if self.path != PAIR or self.pair is not None:
            return self.say(404, b"files go by collective here\n", "text/plain")
        server, address = self.server, (self.server.host, 0)
        listener = socket.create_server(address, family=server.address_family)
        self.say(200, str(listener.getsockname()[1]).encode(), "text/plain", last=False)
        try:
            self.pair = Pair(server.collectives, 0, partial(hosted, listener), server.host, server.stages)
        except (OSError, torch.OutOfMemoryError) as error:
            return self._end(error)
        finally:
            listener.close()
        self.connection.settimeout(None)  # until the next weights
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        log.info("weights go to %s by %s", self.client_address[0], server.collectives.name)

    def do_HEAD(self) -> None:
        """Send a file that is on offer through the pair."""
        if not self.known() or (path := self.offered()) is None:
            return
        if self.pair is None:
            return self.say(409, b"GET /pair comes first\n", "text/plain")
        with path.open("rb") as file:
            content = _mapped(file.fileno(), mmap.ACCESS_COPY)
        if not self.server.turn.acquire(timeout=TURN_S):
            return self.head(503, {"Content-Length": "0"}, last=False)
        try:
            self.head(200, {"Content-Length": str(len(content))}, last=False)
            self.pair.move(content, partial(refuse_the_gone, self.connection))
        except OSError as error:
            self._end(error)
        finally:
            self.server.turn.release()

    def _end(self, error: Exception) -> None:
        log.warning("the pair with %s is given up: %s", self.client_address[0], str(error) or type(error).__name__)
        self.close_connection = True


def _mapped(handle: int, access: int) -> Tensor:
    """The bytes of an open file, uint8 [n]; ACCESS_COPY: where they are written to, it is not the file that changes."""
    return torch.frombuffer(mmap.mmap(handle, 0, access=access), dtype=torch.uint8)
