"""Keeps some of what every step learnt from: the first samples go to samples.jsonl and the trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.callback.base import NoOp
from runner.protocols import Sample, StepEnd


class Rollouts(NoOp):
    """Records the first `keep` samples of each step."""

    def __init__(self, record: Callable[[int, Sequence[Sample]], None], keep: int) -> None:
        self._record, self._keep = record, keep

    def on_step(self, end: StepEnd) -> None:
        if kept := end.samples[: self._keep]:
            self._record(end.step, kept)
