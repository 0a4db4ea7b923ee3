"""Asks held-out questions every so many steps, and keeps some of the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from runner.callback.base import NoOp
from runner.protocols import StepEnd


class Report(Protocol):
    """What an evaluation returns."""

    @property
    def values(self) -> Mapping[str, float]: ...

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]: ...


class Evaluation(NoOp):
    """Runs `evaluate` before the first step, every `every` steps and at the end; its numbers join the step's."""

    def __init__(
        self,
        evaluate: Callable[[], Report],
        *,
        every: int,
        keep: int,
        record: Callable[[int, Sequence[Mapping[str, Any]]], None],
        say: Callable[[str], None],
    ) -> None:
        self._evaluate, self._every, self._keep, self._record, self._say = evaluate, every, keep, record, say

    def on_start(self, step: int) -> None:
        if step == 0:
            report = self._evaluate()
            self._record(0, report.samples[: self._keep])
            self._say("before training: " + _worded(report.values))

    def on_step(self, end: StepEnd) -> None:
        if end.last or end.step % self._every == 0:
            report = self._evaluate()
            end.values.update(report.values)
            self._record(end.step, report.samples[: self._keep])


def _worded(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in values.items() if name.startswith("eval/"))
