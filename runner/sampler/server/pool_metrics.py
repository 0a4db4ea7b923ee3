"""What the clients of rollout servers measure, for the numbers of a step."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from statistics import fmean

SUMS = ("load_s", "restarts", "resyncs", "rejected")


class PoolMetrics:
    """Sums over the calls since `pop`; the thread that trains reads what another one measures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._tokens = 0
        self._seconds = 0.0
        self._queue = 0
        self._devices: dict[str, dict[str, float]] = {}

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


def _aggregate(devices: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Of all servers: the mean of percentages, else the greatest value, e.g. the fullest device's memory."""
    found = {name: [one[name] for one in devices if name in one] for one in devices for name in one}
    return {name: fmean(values) if name.endswith("_percent") else max(values) for name, values in found.items()}
