"""SIGINT and SIGTERM: they end a run at once while it is built, later after the step in hand; a second one, at once.

install ─▶ at_once(): Interrupted, there is nothing to save ─▶ loop: asks between steps, saves, Interrupted
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from runner.core.errors import Interrupted

log = logging.getLogger("runner")


class StopNow(BaseException):
    """Ends what runs at once. No `except Exception` on its way takes it for a fault. Not KeyboardInterrupt: one that
    passes through the execution of a string (namedtuple, dataclass) makes CPython end by SIGINT, whatever exit code
    the program gives."""


class StopSignal:
    """Remembers the first signal; the loop asks between steps."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._agreed: int | None = None
        self._at_once = False

    @property
    def requested(self) -> bool:
        """Whether the run should end after this step, as all ranks agreed."""
        return self._agreed is not None

    def agree(self, gather: Callable[[int | None], Sequence[int | None]]) -> None:
        """Take the first signal that any rank has received, so that all end after the same step.

        gather: what every rank has received, this one among them; all ranks call it
        """
        self._agreed = next((number for number in gather(self.number) if number is not None), None)

    def install(self) -> None:
        """Take over SIGINT and SIGTERM. SIGINT stays ignored where the parent ignores it (nohup)."""
        _taken(self._receive)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The same for the time of the block."""
        with _restored(_taken(self._receive)):
            yield

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            with suppress(OSError):
                os.write(2, b"\nended at once; a resume goes on from the last checkpoint\n")
            os._exit(128 + number)
        self.number = number
        if self._at_once:
            raise StopNow
        said = f"\n{_name(number)}: finishing this step, then saving; send it again to stop immediately\n"
        with suppress(OSError):  # nobody may be left to read it
            os.write(2, said.encode())  # no logging, no stream: what the signal interrupted may hold their locks

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that a signal ends without delay, because there is nothing to save yet. Raises Interrupted."""
        self._at_once = True
        try:
            yield
        except StopNow:
            assert self.number is not None
        finally:
            self._at_once = False
        if self.number is not None:  # also one that came before the block, or that a library swallowed
            raise Interrupted(self.number, f"{_name(self.number)} before a step was made; no checkpoint was written")

    def raise_if_requested(self, step: int, steps: int) -> None:
        """Raise Interrupted if a signal arrived and there is still something left to do."""
        if self._agreed is not None and step < steps:
            name = _name(self._agreed)
            log.warning("%s: step %d is finished and saved", name, step)
            raise Interrupted(self._agreed, f"{name} after step {step} of {steps}; a checkpoint was written")


def _name(number: int) -> str:
    return signal.Signals(number).name


def _taken(receive: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Let SIGINT and SIGTERM go to `receive`, unless the parent ignores them; who had them before."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, receive) for number in numbers}


@contextmanager
def _restored(before: dict[int, Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """SIGINT and SIGTERM, noted in their order by a process that passes them on to those which it has started."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals inside the block. SIGINT stays ignored where the parent ignores it (nohup)."""
        with _restored(_taken(self._receive)):
            yield

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
