"""What the samplers did since it was last asked for, as numbers of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SUMS = ("load_s", "restarts", "resyncs", "rejected")


class Counts:
    """Added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._tokens, self._seconds, self._queue = 0, 0.0, 0

    def add(self, name: str, amount: float = 1) -> None:
        """So much more of it."""
        with self._lock:
            self._sums[name] += amount

    def drawn(self, tokens: int, seconds: float, queue: int) -> None:
        """Answers have come. queue: the most that one sampler was asked for at once."""
        with self._lock:
            self._tokens += tokens
            self._seconds += seconds
            self._queue = max(self._queue, queue)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begin)

    def taken(self) -> dict[str, float]:
        """The numbers, which then begin anew."""
        with self._lock:
            found = dict(self._sums)
            if self._seconds:
                found |= {"tokens_per_s": self._tokens / self._seconds, "queue": float(self._queue)}
            self._sums = dict.fromkeys(SUMS, 0.0)
            self._tokens, self._seconds, self._queue = 0, 0.0, 0
        return found
