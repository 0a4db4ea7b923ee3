"""Writes every thread's stack when a step takes too long; the standard library's watchdog does the work."""

from __future__ import annotations

import faulthandler
from pathlib import Path

from runner.callback.base import NoOp
from runner.protocols import StepEnd


class StallWatch(NoOp):
    """Re-arms a timer at each step; a step above `stall_s` seconds leaves its stacks in `path`."""

    def __init__(self, path: Path, stall_s: float) -> None:
        self._path, self._stall_s = path, stall_s

    def on_start(self, step: int) -> None:
        self._file = self._path.open("w")
        self._arm()

    def on_step(self, end: StepEnd) -> None:
        self._arm()

    def on_end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._stall_s, repeat=True, file=self._file)
