"""Requests between the event loop, which receives them, and the thread that computes.

    seq 2, 3, 1 ─TrainingClient─▶ 1, 2, 3 ──queue──▶ compute ──▶ future ◀─held─ retrieve_future
    the same request again ─────────────────────────────────────▶ the same future

All but the queue belongs to the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from runner.core.errors import CheckpointError, DataError, RunnerError
from runner.tinker.checkpoints import ClientRecord, NotFoundError
from runner.tinker.messages import PassResult, SampleResult

Json = Mapping[str, Any]
Result = Json | PassResult | SampleResult  # what a client is answered
KEPT_RESULTS = 256  # that were sent; a client that has lost an answer asks again
GAP_S = 300.0  # after which a missing request is given up: clients retry for as long
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # by a body of another form


class TooManyRequestsError(RunnerError):
    """A key has too many unanswered requests."""


class GoneError(RunnerError):
    """What the client names was there and is not any more."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A verb of the service, its arguments, and what its result becomes for the client.

    finish: an answer, or what makes it of the verb's result in the thread that computes; None = it comes later
    """

    verb: str
    arguments: tuple[Any, ...] = ()
    finish: Json | Callable[[Any], Result] | None = None
    future: Future[Result] = field(default_factory=Future)


Prepare = Callable[[], Operation]  # raises DataError, GoneError, and MALFORMED


def prepare_operation(prepare: Prepare) -> Operation:
    """The operation of a request, which has failed already where the request is wrong.

    A wrong request has its place in the order, too: those after it would wait for it.
    """
    try:
        return prepare()
    except (*MALFORMED, DataError, GoneError) as error:
        failed = Operation("refuse")
        failed.future.set_exception(as_runner_error(error))
        return failed


class TrainingClient:
    """A training client; its requests are computed in the order of their numbers, from 1."""

    def __init__(self, record: ClientRecord, queue: SimpleQueue[Operation]) -> None:
        self.record, self.owner = record, record.owner
        self._queue, self.next, self._since = queue, 1, 0.0
        self._waiting: dict[int, Operation] = {}

    def put(self, seq_id: int, operation: Operation) -> None:
        """Queue a request as soon as those before it are there."""
        self._waiting[seq_id] = operation
        self._since = time.monotonic()
        while self.next in self._waiting:
            self._queue.put(self._waiting.pop(self.next))
            self.next += 1

    def give_up_gap(self, now: float) -> str | None:
        """Fail what has waited too long for a request that never came; returns what happened."""
        if not self._waiting or now - self._since < GAP_S:
            return None
        text = f"request {self.next} of this client did not arrive within {GAP_S:g} s, so those after it were dropped"
        self.next = max(self._waiting) + 1
        self.fail_waiting(DataError(text))
        return text

    def fail_waiting(self, error: RunnerError) -> None:
        """Fail what waits for a request that has not come."""
        for operation in self._waiting.values():
            if not operation.future.done():
                operation.future.set_exception(error)
        self._waiting.clear()


class Futures:
    """The requests of all clients by their ids, with the keys that own them."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._table: dict[str, tuple[str, Future[Result]]] = {}
        self._answered: dict[str, None] = {}  # the oldest first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._table

    def check_room(self, owner: str) -> None:
        """Raise TooManyRequestsError where a key has as many unanswered requests as it may."""
        count = sum(owner == other for id, (other, _) in self._table.items() if id not in self._answered)
        if count >= self._max_requests:
            text = f"{count} requests of this key are unanswered (tinker.max_requests)"
            raise TooManyRequestsError(f"{text}; try again later")

    def add(self, request_id: str, owner: str, future: Future[Result]) -> None:
        """Keep a request's future."""
        self._table[request_id] = (owner, future)

    def get(self, request_id: str, owner: str) -> Future[Result]:
        """Raises NotFoundError, also where another key owns it."""
        found = self._table.get(request_id)
        if found is None or found[0] != owner:
            raise NotFoundError(f"no request '{request_id}'; the server may have been restarted since it was sent")
        return found[1]

    def mark_answered(self, request_id: str) -> None:
        """Note that a result was sent; the oldest of these go where there are many."""
        self._answered[request_id] = None
        if len(self._answered) > KEPT_RESULTS:
            self._forget(next(iter(self._answered)))

    def drop(self, prefix: str) -> None:
        """Forget the requests whose ids begin so."""
        for request_id in [one for one in self._table if one.startswith(prefix)]:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        for table in (self._table, self._answered):
            table.pop(request_id, None)


STATUSES: Mapping[type[Exception], int] = {
    NotFoundError: 404,
    GoneError: 410,
    TooManyRequestsError: 429,
    DataError: 400,
    CheckpointError: 400,
}


def as_runner_error(error: Exception) -> RunnerError:
    """An error of a request as the client reads it: what a body of another form raises names itself."""
    if isinstance(error, RunnerError):
        return error
    return DataError(f"the request is malformed: {type(error).__name__}: {error}")


def describe_error(error: BaseException) -> tuple[int, dict[str, str]]:
    """The HTTP status of an error, and its text and category as the SDK reads them.

    A bug's traceback is not sent.
    """
    status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 500)
    bug = f"{type(error).__name__} in the server; its run.log has the traceback"
    text = str(error) if isinstance(error, RunnerError) else bug
    return status, {"error": text, "category": "server" if status == 500 else "user"}
