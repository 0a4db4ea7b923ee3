"""What the samplers did since it was last asked for, as numbers of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

SUMS = ("load_s", "restarts", "resyncs", "rejected")


class Counts:
    """Added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._tokens, self._seconds, self._queue = 0, 0.0, 0
        self._devices: dict[int, Mapping[str, float]] = {}

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

    def watched(self, index: int, numbers: Mapping[str, float]) -> None:
        """What the device of sampler `index` was found to be doing; nothing where it was not looked at since."""
        with self._lock:
            self._devices[index] = {**self._devices.get(index, {}), **numbers}

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
            found |= _together(self._devices.values())
            self._tokens, self._seconds, self._queue = 0, 0.0, 0
            self._devices = {}
        return found


def _together(devices: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of all samplers: the mean of what is in percent, else the greatest, e.g. the fullest device's memory."""
    found = {name: [one[name] for one in devices if name in one] for one in devices for name in one}
    return {
        name: sum(values) / len(values) if name.endswith("_percent") else max(values) for name, values in found.items()
    }
