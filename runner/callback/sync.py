"""Adds to a step's numbers what sending the weights to samplers took."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.callback.base import NoOp
from runner.protocols import StepEnd


class Sync(NoOp):
    """numbers: see `Publisher.numbers`."""

    def __init__(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        self._numbers = numbers

    def on_step(self, end: StepEnd) -> None:
        end.values.update(self._numbers())
