"""Signals to a run.

    SIGINT, SIGTERM   while it is built: it ends at once; later: after this step, with a checkpoint; again: at once
    SIGHUP            the first signal: as SIGTERM; later: nothing, since a terminal that is closed sends several
    SIGUSR1           after the current step it saves a checkpoint and continues; before the first one: nothing to save

install ─▶ interrupt_immediately(): Interrupted, nothing to save ─▶ loop: checks between steps, saves, Interrupted
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

from runner.core.errors import Interrupted

log = logging.getLogger("runner")
STOPS, SAVE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIGUSR1
Handler = Callable[[int, FrameType | None], None]


class StopNow(BaseException):
    """Ends the running block immediately; no `except Exception` catches it.

    Not KeyboardInterrupt: if it passes through executed source text (namedtuple, dataclass), CPython ends by SIGINT
    whatever the program's exit code is.
    """


class StopSignal:
    """Stores the first signal; the loop checks it between steps."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._agreed: int | None = None
        self._at_once = self._wants_checkpoint = False
        self.checkpoint_requested = False  # SIGUSR1: whether to save this step, as all ranks agreed

    @property
    def is_requested(self) -> bool:
        """Whether the run should end after this step, as all ranks agreed."""
        return self._agreed is not None

    def agree_across_ranks(self, gather: Callable[[int | None], Sequence[int | None]]) -> None:
        """Use the first signal that any rank has received, so that all end, or save, after the same step.

        gather: the signals that all ranks have received; all ranks call it
        """
        wants_checkpoint, self._wants_checkpoint = self._wants_checkpoint, False
        received = gather(self.number or (SAVE if wants_checkpoint else None))
        self.checkpoint_requested = SAVE in received
        self._agreed = next((number for number in received if number not in (None, SAVE)), None)

    def install(self) -> None:
        """Install the handlers, except where the parent ignores a signal (nohup) or SIGUSR1 has a handler."""
        _install_handler(self._receive, (*STOPS, SAVE))

    def handle_signals(self) -> AbstractContextManager[None]:
        """Install the handlers for the block."""
        return _handlers(self._receive, (*STOPS, SAVE))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self._wants_checkpoint = True
            _write_to_stderr(f"\n{signal_name(number)}: saving a checkpoint after this step; the run continues\n")
            return
        if number == signal.SIGHUP:
            if self.number is not None:
                return
            number = signal.SIGTERM
        if self.number is not None:
            _write_to_stderr("\nstopped immediately; a resume continues from the last checkpoint\n")
            os._exit(128 + number)
        self.number = number
        if self._at_once:
            raise StopNow
        name = signal_name(number)
        _write_to_stderr(f"\n{name}: finishing this step, then saving; send it again to stop immediately\n")

    @contextmanager
    def interrupt_immediately(self) -> Iterator[None]:
        """A block that a signal ends immediately, because there is nothing to save yet. Raises Interrupted.

        After a signal the block is not entered: the build of a large model would outlast the time that Slurm gives.
        """
        try:
            self._at_once = True  # first: a signal after the check raises
            if self.number is None:
                yield
        except StopNow:
            assert self.number is not None
        finally:
            self._at_once = False
        if self.number is not None:  # also one that a library caught
            name = signal_name(self.number)
            raise Interrupted(self.number, f"{name} before the first step ended; no checkpoint was written")

    def raise_if_requested(self, step: int, steps: int) -> None:
        """Raise Interrupted if a signal arrived and steps are left."""
        if self._agreed is not None and step < steps:
            name = signal_name(self._agreed)
            log.warning("%s: step %d is finished and saved", name, step)
            raise Interrupted(self._agreed, f"{name} after step {step} of {steps}; a checkpoint was written")


def signal_name(number: int) -> str:
    """SIGTERM for 15; `signal 99` for a number without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _write_to_stderr(text: str) -> None:
    """Write without logging and streams, whose locks the interrupted code may hold."""
    with suppress(OSError):  # the reader may have ended
        os.write(2, text.encode())


def _install_handler(receive: Handler, numbers: Sequence[int]) -> dict[int, Any]:
    """Send these signals to `receive`, except ignored ones and a handled SIGUSR1; returns old handlers."""
    before = {number: signal.getsignal(number) for number in numbers}
    kept = [
        n
        for n, handler in before.items()
        if handler is signal.SIG_IGN or (n == SAVE and handler is not _receive_early and callable(handler))
    ]
    return {number: signal.signal(number, receive) for number in numbers if number not in kept}


@contextmanager
def _handlers(receive: Handler, numbers: Sequence[int]) -> Iterator[None]:
    """A block in which these signals go to `receive`."""
    before = _install_handler(receive, numbers)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def survive_early_save() -> Iterator[None]:
    """A block in which SIGUSR1 does not end the process before a run has installed its handlers."""
    is_free = signal.getsignal(SAVE) is signal.SIG_DFL
    with _handlers(_receive_early, [SAVE] if is_free else []):
        yield


def _receive_early(number: int, frame: FrameType | None) -> None:
    _write_to_stderr(f"\n{signal_name(number)}: there is nothing to save yet; the run continues\n")


class SignalRecorder:
    """Received signals in their order, in a process that forwards them to its children.

    saves: whether to record SIGUSR1, too; the others request the end, SIGHUP like SIGTERM
    """

    def __init__(self, saves: bool = False) -> None:
        self.noted_signals: list[int] = []
        self._numbers = (*STOPS, SAVE) if saves else STOPS

    @property
    def stop_signals(self) -> list[int]:
        """The signals that request the end."""
        return [number for number in self.noted_signals if number != SAVE]

    def record_signals(self) -> AbstractContextManager[None]:
        """Record signals inside the block. A signal that the parent ignores stays ignored (nohup)."""
        return _handlers(self._receive, self._numbers)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            self.noted_signals.append(number)
        elif not self.stop_signals:
            self.noted_signals.append(signal.SIGTERM)
