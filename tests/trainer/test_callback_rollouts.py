"""Some of what each step trained on is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from runner.interfaces import StepResult
from runner.trainer.callbacks import LogRollouts


@pytest.mark.parametrize(("keep", "wanted"), [(0, []), (2, [(3, 2)]), (9, [(3, 3)])])
def test_the_first_samples_of_a_step_are_recorded(keep: int, wanted: list[tuple[int, int]]) -> None:
    seen: list[tuple[int, int]] = []

    def record(step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        assert [row["answer"] for row in rows] == list("abc")[: len(rows)]
        seen.append((step, len(rows)))

    LogRollouts(record, keep).on_step(StepResult(3, {}, last=False, samples=[{"answer": a} for a in "abc"]))
    assert seen == wanted


def test_a_step_without_samples_records_nothing() -> None:
    LogRollouts(lambda step, rows: pytest.fail("nothing to record"), 2).on_step(StepResult(1, {}, last=False))
