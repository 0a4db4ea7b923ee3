"""What may stand between trainer and sampler in a test: a wire that is cut or goes dead, and one who edits answers."""

from __future__ import annotations

import json
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

from runner.sampler.remote.listening import Note, path_of
from tests.sampler.remote.processes import Process

Edit = Callable[[str, dict[str, Any]], dict[str, Any]]  # path, answer → answer
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


def noted(folder: Path, note: Note, address: str, index: int = 0) -> Path:
    """A folder in which a sampler is said to be at another address."""
    folder.mkdir(exist_ok=True)
    replace(note, url=address).write(path_of(folder, index))
    return folder


@contextmanager
def wire(process: Process, folder: Path, cuts: Sequence[tuple[int, str]]) -> Iterator[Path]:
    """A folder of notes for clients whose n-th connection ends after so many bytes of an answer: "cut", or "dead" """
    target, left = process.note().address, list(cuts)

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
        yield noted(folder, process.note(), address)


def _pump(source: socket.socket, sink: socket.socket, most: int) -> None:
    with suppress(OSError):
        while most and (content := source.recv(min(most, 1 << 16))):
            sink.sendall(content)
            most -= len(content)


@contextmanager
def edited(process: Process, folder: Path, edit: Edit) -> Iterator[Path]:
    """A folder of notes for clients who hear what `edit` makes of the sampler's answers."""
    note = process.note()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            connection = HTTPConnection(*note.address, timeout=60)
            connection.request("POST", self.path, body, {"Authorization": self.headers["Authorization"]})
            answer = edit(self.path, json.loads(connection.getresponse().read()))
            connection.close()
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with running(ThreadingHTTPServer(LOOPBACK, Handler)) as address:
        yield noted(folder, note, address)
