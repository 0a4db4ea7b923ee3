"""How long something is waited for, and how the waiting is broken off from another thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from runner.core.errors import SamplerFault


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
            raise SamplerFault("samplers are not waited for any more")
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
