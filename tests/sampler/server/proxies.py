"""What may stand between trainer and sampler in a test: a wire that is cut or goes dead, and one who edits answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from runner.sampler.server.protocol import Array, Endpoint, decode, encode, endpoint_path
from tests.sampler.server.processes import Process

Edit = Callable[[str, dict[str, Any], list[Array]], None]  # changes the header and the arrays of a path's answer
LOOPBACK = ("127.0.0.1", 0)


@contextmanager
def running(server: Any) -> Iterator[str]:
    """The address of a server that runs while the block does."""
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def redirect(folder: Path, endpoint: Endpoint, address: str, index: int = 0) -> Path:
    """A folder in which a sampler is said to be at another address."""
    folder.mkdir(exist_ok=True)
    replace(endpoint, url=address).write(endpoint_path(folder, index))
    return folder


@contextmanager
def wire(process: Process, folder: Path, cuts: Sequence[tuple[int, str]]) -> Iterator[Path]:
    """A folder for clients whose n-th connection ends after so many bytes of an answer: "cut", or "dead" """
    target, left = address_of(process.endpoint()), list(cuts)

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            most, end = left.pop(0) if left else (1 << 40, "cut")
            with socket.create_connection(target) as there:
                threading.Thread(target=_pump, args=(self.request, there, 1 << 40), daemon=True).start()
                _pump(there, self.request, most)
                if end == "dead":
                    with suppress(OSError):
                        self.request.recv(1)  # until the client goes
                with suppress(OSError):
                    there.shutdown(socket.SHUT_RDWR)

    with running(ThreadingTCPServer(LOOPBACK, Handler)) as address:
        yield redirect(folder, process.endpoint(), address)


def address_of(endpoint: Endpoint) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(endpoint.url)
    return parts.hostname or "", parts.port or 0


def _pump(source: socket.socket, sink: socket.socket, most: int) -> None:
    with suppress(OSError):
        while most and (content := source.recv(min(most, 1 << 16))):
            sink.sendall(content)
            most -= len(content)


@contextmanager
def edited(process: Process, folder: Path, edit: Edit) -> Iterator[Path]:
    """A folder of endpoint files for clients who get what `edit` makes of the sampler's answers."""
    endpoint = process.endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            connection = HTTPConnection(*address_of(endpoint), timeout=60)
            connection.request("POST", self.path, body, {"Authorization": self.headers["Authorization"]})
            header, arrays = decode(connection.getresponse().read())
            connection.close()
            arrays = [array.copy() for array in arrays]
            edit(self.path, header, arrays)
            content = encode(header, *arrays)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with running(ThreadingHTTPServer(LOOPBACK, Handler)) as address:
        yield redirect(folder, endpoint, address)
