"""What the clients of rollout servers measure, for the numbers of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean

SUMS = ("load_s", "restarts", "resyncs", "rejected")


class PoolMetrics:
    """Sums over the calls since `pop`; the thread that trains reads what another one measures."""

    _sums: dict[str, float]
    _tokens: int
    _seconds: float
    _queue: int
    _devices: dict[str, dict[str, float]]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def pop(self) -> dict[str, float]:
        """The numbers, which then start from zero."""
        with self._lock:
            found = self._sums | _aggregate(self._devices.values())
            if self._seconds:
                found |= {"tokens_per_s": self._tokens / self._seconds, "queue": float(self._queue)}
            self._reset()
        return found

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a sum."""
        with self._lock:
            self._sums[name] += amount

    def record_batch(self, tokens: int, seconds: float, queue: int) -> None:
        """A batch was sampled. queue: the most requests that one server got at once."""
        with self._lock:
            self._tokens += tokens
            self._seconds += seconds
            self._queue = max(self._queue, queue)

    def record_device(self, name: str, stats: Mapping[str, float]) -> None:
        """The newest stats of a server's device; without any, the older ones stay."""
        with self._lock:
            self._devices[name] = {**self._devices.get(name, {}), **stats}

    @contextmanager
    def measure_seconds(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begin)

    def _reset(self) -> None:
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._tokens, self._queue = 0, 0
        self._seconds = 0.0
        self._devices = {}


def _aggregate(devices: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Of all servers: the mean of percentages, else the greatest value, e.g. the fullest device's memory."""
    found = {name: [one[name] for one in devices if name in one] for one in devices for name in one}
    return {name: fmean(values) if name.endswith("_percent") else max(values) for name, values in found.items()}
