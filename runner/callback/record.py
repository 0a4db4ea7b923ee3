"""Writes each finished step to the trackers and the screen, in that order: the file is the truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from runner.callback.base import NoOp
from runner.protocols import StepEnd

Sink = Callable[[int, Mapping[str, float]], None]


class Record(NoOp):
    """Hands every step's numbers to each sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def on_step(self, end: StepEnd) -> None:
        for sink in self._sinks:
            sink(end.step, end.values)
