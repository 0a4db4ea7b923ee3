"""The feed runs collection up to `lag` steps ahead of training.

    step s is collected with exactly the weights published after step s - 1 - lag
    (the first ones for the first lag + 1 steps)

With lag = 0 collection runs in the caller, strictly on-policy; with lag = k it runs in one thread, k steps ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from runner.interfaces import State

T = TypeVar("T")


class Feed(Generic[T]):
    """Experiences up to step last-1, in order. Consumes `collect(step)`; waits in `take` and `state_dict`.

    encode, decode: an experience as a checkpoint keeps it, and back
    """

    def __init__(
        self,
        collect: Callable[[int], T],
        last: int,
        lag: int,
        *,
        encode: Callable[[T], State],
        decode: Callable[[State], T],
    ) -> None:
        self._collect, self._last, self._lag = collect, last, lag
        self._encode, self._decode = encode, decode
        self._next = 0
        self._pending: dict[int, Future[T]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def start(self, first: int) -> None:
        """Begin to collect, at `first` or after what a checkpoint brought."""
        self._next = max([first, *(step + 1 for step in self._pending)])
        if self._lag:
            self._pool = ThreadPoolExecutor(1, "feed")
        self._submit_until(first + self._lag)

    def take(self, step: int) -> T:
        """The experience of `step`; raises what its collection raised."""
        if step in self._pending:
            return self._pending.pop(step).result()
        return self._collect(step)

    def published(self, step: int) -> None:
        """The weights after `step` are in place, so one more step may be collected."""
        self._submit_until(step + 1 + self._lag)

    def state_dict(self) -> State:
        """Every experience that was collected ahead, by its step; waits for those being collected."""
        encoded = {step: self._encode(future.result()) for step, future in self._pending.items()}
        tensors = {f"{step}/{name}": t for step, one in encoded.items() for name, t in one.pop("tensors", {}).items()}
        return {"steps": {str(step): one for step, one in encoded.items()}, "tensors": tensors}

    def load_state_dict(self, state: State) -> None:
        """Take back what `state_dict` gave; `start` goes on behind it."""
        for name, one in state["steps"].items():
            mine = {k.removeprefix(f"{name}/"): t for k, t in state["tensors"].items() if k.startswith(f"{name}/")}
            future: Future[T] = Future()
            future.set_result(self._decode({**one, "tensors": mine}))
            self._pending[int(name)] = future

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
