"""Saves a checkpoint every so many steps, when a signal ends the run, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.callback.base import NoOp
from runner.protocols import StepEnd


class Saving(NoOp):
    """Calls `save(step, values)`; it hangs last, so that every other callback's state is that of the finished step."""

    def __init__(self, save: Callable[[int, Mapping[str, float]], object], *, every: int) -> None:
        self._save, self._every = save, every

    def on_step(self, end: StepEnd) -> None:
        if end.last or end.stopping or (self._every and end.step % self._every == 0):
            self._save(end.step, end.values)
