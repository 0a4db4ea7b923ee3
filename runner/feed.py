"""The feed runs collection up to `lag` steps ahead of training.

    step s is collected with exactly the weights published after step s - 1 - lag
    (the initial ones for the first lag + 1 steps)

With lag = 0 collection runs in the caller, strictly on-policy; with lag = k it runs in one thread, k steps ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Experiences of steps first … last-1, in order. Consumes `collect(step)`; waits only in `take`."""

    def __init__(self, collect: Callable[[int], T], first: int, last: int, lag: int) -> None:
        self._collect = collect
        self._next = first
        self._last = last
        self._lag = lag
        self._pending: dict[int, Future[T]] = {}
        self._pool = ThreadPoolExecutor(1, "feed") if lag else None
        self._submit_until(first + lag)

    def take(self, step: int) -> T:
        """The experience of `step`; raises what its collection raised."""
        if self._pool is None:
            return self._collect(step)
        return self._pending.pop(step).result()

    def published(self, step: int) -> None:
        """The weights after `step` are in place, so one more step may be collected."""
        self._submit_until(step + 1 + self._lag)

    def _submit_until(self, step: int) -> None:
        if self._pool is None:
            return
        while self._next <= min(step, self._last - 1):
            self._pending[self._next] = self._pool.submit(self._collect, self._next)
            self._next += 1

    def __enter__(self) -> Feed[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
