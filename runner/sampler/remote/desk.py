"""Work for the one thread that has the sampler, handed in by the threads that speak with clients.

threads of clients ──ask──▶ queue ──one piece after another──▶ the thread that `run` was called in
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn

from runner.core.errors import SamplerFault

Work = Callable[[], dict[str, Any]]


class Desk:
    """What a sampler is asked for. A model's device, thread pool and modes belong to the thread that built it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[dict[str, Any]], Work]] = SimpleQueue()
        self.busy = False

    @property
    def waiting(self) -> int:
        """Pieces of work that have not begun."""
        return self._queue.qsize()

    def ask(self, work: Work) -> Future[dict[str, Any]]:
        """Hand in a piece of work. Cancelled before it begins, it is never done."""
        future: Future[dict[str, Any]] = Future()
        self._queue.put((future, work))
        return future

    def run(self) -> NoReturn:
        """Do what is handed in, for ever: until something is raised here that is no Exception, or a SamplerFault."""
        while True:
            future, work = self._queue.get()
            if future.set_running_or_notify_cancel():
                self._do(future, work)

    def _do(self, future: Future[dict[str, Any]], work: Work) -> None:
        self.busy = True
        try:
            future.set_result(work())
        except BaseException as error:
            ends = isinstance(error, SamplerFault) or not isinstance(error, Exception)
            future.set_exception(ConnectionAbortedError("the sampler ends") if ends else error)
            if ends:
                raise
        finally:
            self.busy = False
