"""Work in a daemon thread, which the end of the program does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work` in a new thread; the future has its result, or raises its error."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits raises it
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
