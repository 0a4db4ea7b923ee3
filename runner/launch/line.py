"""A line between two machines' launchers: JSON, one message after another, over TCP."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

READ_BYTES = 2**16
LONGEST_BYTES = 2**24  # of a message
# seconds until a machine that went without a word is noticed: 10 + 3 × 5
ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Line:
    """One end of it. `said`: the newest of each kind of message that came; `name`: who is at the other end."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.socket, self.name = connection, name
        self.said: dict[str, Any] = {}
        self._rest, self._broken = b"", False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Say something; nobody may be left to hear it, which `listen` finds out."""
        self.socket.settimeout(5)
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def listen(self) -> bool:
        """Take in what has come; whether the line is broken: it ended, or what came is no message."""
        self.socket.setblocking(False)
        while not self._broken:
            try:
                content = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                content = b""
            *lines, self._rest = (self._rest + content).split(b"\n")
            understood = all(self._takes(line) for line in lines)
            self._broken = not content or not understood or len(self._rest) > LONGEST_BYTES
        return self._broken

    def _takes(self, line: bytes) -> bool:
        """Take in a message; whether it is one: an object."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if isinstance(message, dict):
            self.said |= message
        return isinstance(message, dict)
