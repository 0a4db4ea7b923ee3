"""A server that accepts one request and answers it drop by drop, without end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n"
ENOUGH_S = 100.0  # after which a client has no deadline

# (what is sent at once, what is sent again and again)
WAYS = pytest.mark.parametrize(
    ("sent", "drop"),
    [(b"", b""), (HEAD + b"\r\n", b" "), (HEAD, b"X-Wait: 1\r\n")],
    ids=["silent", "dripped body", "dripped headers"],
)


@dataclass
class Dripping:
    """url: where it listens; left: set when the client has hung up before ENOUGH_S."""

    url: str
    left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def dripping(sent: bytes, drop: bytes) -> Iterator[Dripping]:
    """The server; at the end its one connection is over."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30.0)
        made = Dripping(f"http://127.0.0.1:{listening.getsockname()[1]}")

        def answer() -> None:
            try:
                connection, _ = listening.accept()
            except TimeoutError:  # the client's time was over before it connected
                made.left.set()
                return
            with connection:
                connection.recv(65536)
                connection.sendall(sent)
                connection.settimeout(0.02)
                for _ in range(int(ENOUGH_S / 0.02)):
                    try:
                        connection.sendall(drop)
                        gone = connection.recv(65536) == b""
                    except TimeoutError:
                        continue
                    except OSError:
                        gone = True
                    if gone:
                        made.left.set()
                        return

        thread = threading.Thread(target=answer)
        thread.start()
        yield made
        thread.join()
