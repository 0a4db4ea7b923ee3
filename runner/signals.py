"""SIGINT and SIGTERM end a run after the step in hand; a second one ends it at once."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType

from runner.errors import Interrupted

log = logging.getLogger("runner")


class StopSignal:
    """Remembers the first signal; the loop asks between steps."""

    def __init__(self) -> None:
        self.number: int | None = None

    @property
    def requested(self) -> bool:
        """Whether the run should end after this step."""
        return self.number is not None

    def install(self) -> None:
        """Take over SIGINT and SIGTERM. SIGINT stays ignored where the parent ignores it (nohup)."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.number = number
        log.warning("%s: finishing this step, then saving; once more ends at once", signal.Signals(number).name)

    def raise_if_requested(self, step: int, steps: int) -> None:
        """Raise Interrupted if a signal arrived and there is still something left to do."""
        if self.number is not None and step < steps:
            name = signal.Signals(self.number).name
            raise Interrupted(self.number, f"{name} after step {step} of {steps}; a checkpoint was written")
