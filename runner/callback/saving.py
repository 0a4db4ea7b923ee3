"""Saves a checkpoint every so many steps, when a signal ends the run, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.callback.base import NoOp
from runner.protocols import StepEnd

Save = Callable[[int, Mapping[str, float]], object]


class Saving(NoOp):
    """Hangs last, so that every other callback's state is that of the finished step.

    save: commits the state after a step; start: begins to, and training may go on; check: raises what went wrong since
    """

    def __init__(self, save: Save, start: Save, check: Callable[[], None], *, every: int) -> None:
        self._save, self._start, self._check, self._every = save, start, check, every

    def on_step(self, end: StepEnd) -> None:
        self._check()
        if end.last or end.stopping:
            self._save(end.step, end.values)
        elif self._every and end.step % self._every == 0:
            self._start(end.step, end.values)
