"""Requests between the event loop, which receives them, and the thread that computes.

    seq 2, 3, 1 ──RequestOrder──▶ 1, 2, 3 ──OperationQueue──▶ compute ──▶ future ◀─held─ retrieve_future
    the same request again ──────────────────────────────────────────────▶ the same future

All but the queue belongs to the event loop's thread.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from runner.core.errors import CheckpointError, DataError, RunnerError
from runner.tinker.checkpoints import NotFoundError
from runner.tinker.messages import PassResult, SampleResult

Result = Mapping[str, Any] | PassResult | SampleResult  # what a client is answered
KEPT_RESULTS = 256  # that were sent; a client that has lost an answer asks again
GAP_S = 300.0  # after which a missing request is given up: clients retry for as long


class TooManyRequestsError(RunnerError):
    """A key has too many unanswered requests."""


class GoneError(RunnerError):
    """What the client names was there and is not any more."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A verb of the service, its arguments, and what its result becomes for the client.

    finish runs in the thread that computes
    """

    verb: str
    arguments: tuple[Any, ...]
    finish: Callable[[Any], Result]
    future: Future[Result] = field(default_factory=Future)


class OperationQueue:
    """Operations in the order in which they are computed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Operation] = SimpleQueue()

    def put(self, operation: Operation) -> None:
        """From any thread."""
        self._queue.put(operation)

    def get(self, timeout_s: float) -> Operation | None:
        """The next one, or None after the time."""
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait()
        except Empty:
            return None


class RequestOrder:
    """The requests of one training client, which are computed in the order of their numbers, from 1."""

    def __init__(self, queue: OperationQueue) -> None:
        self._queue, self.next, self._since = queue, 1, 0.0
        self._waiting: dict[int, Operation | None] = {}

    def put(self, seq_id: int, operation: Operation | None) -> None:
        """Take a request; None = it has failed already, so that nothing is left to compute."""
        self._waiting[seq_id] = operation
        self._advance()

    def give_up_gap(self, now: float) -> str | None:
        """Fail what has waited too long for a request that never came; returns what happened."""
        if not self._waiting or now - self._since < GAP_S:
            return None
        text = f"request {self.next} of this client did not arrive within {GAP_S:g} s, so those after it were dropped"
        for operation in self._waiting.values():
            if operation is not None:
                operation.future.set_exception(DataError(text))
        self.next = max(self._waiting) + 1
        self._waiting.clear()
        return text

    def close(self, why: str) -> None:
        """Fail what waits for a request that has not come."""
        for operation in self._waiting.values():
            if operation is not None:
                operation.future.set_exception(GoneError(why))
        self._waiting.clear()

    def _advance(self) -> None:
        while self.next in self._waiting:
            operation = self._waiting.pop(self.next)
            self.next += 1
            if operation is not None:
                self._queue.put(operation)
        self._since = time.monotonic()


class Futures:
    """The requests of all clients by their ids, with the keys that own them."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._found: dict[str, tuple[str, Future[Result]]] = {}
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._unanswered: Counter[str] = Counter()  # by key

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._found

    def admit(self, owner: str) -> None:
        """Raise TooManyRequestsError where a key has as many unanswered requests as it may."""
        if self._unanswered[owner] >= self._max_requests:
            text = f"{self._unanswered[owner]} requests of this key are unanswered (tinker.max_requests)"
            raise TooManyRequestsError(f"{text}; try again later")

    def add(self, request_id: str, owner: str, future: Future[Result]) -> None:
        """Keep a request's future."""
        self._found[request_id] = (owner, future)
        self._unanswered[owner] += 1

    def get(self, request_id: str, owner: str) -> Future[Result]:
        """Raises NotFoundError, also where another key owns it."""
        found = self._found.get(request_id)
        if found is None or found[0] != owner:
            raise NotFoundError(f"no request '{request_id}'; the server may have been restarted since it was sent")
        return found[1]

    def mark_answered(self, request_id: str) -> None:
        """Note that a result was sent; the oldest of these go where there are many."""
        if request_id not in self._found:  # its session ended meanwhile
            return
        if request_id not in self._answered:
            self._unanswered[self._found[request_id][0]] -= 1
        self._answered[request_id] = None
        self._answered.move_to_end(request_id)
        while len(self._answered) > KEPT_RESULTS:
            del self._found[self._answered.popitem(last=False)[0]]

    def drop(self, prefix: str) -> None:
        """Forget the requests whose ids begin so."""
        for request_id in [one for one in self._found if one.startswith(prefix)]:
            owner, _ = self._found.pop(request_id)
            if self._answered.pop(request_id, owner) is not None:
                self._unanswered[owner] -= 1


def failure_json(error: BaseException) -> dict[str, str]:
    """A failed request as the SDK reads it."""
    if isinstance(error, DataError | CheckpointError | GoneError):
        return {"error": str(error), "category": "user"}
    if isinstance(error, RunnerError):
        return {"error": str(error), "category": "server"}
    return {"error": f"{type(error).__name__} in the server; its run.log has the traceback", "category": "server"}
