"""Which checkpoints stay."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.checkpoint.config import CheckpointConfig, direction
from runner.checkpoint.step_folders import best_step, refuse_unmeasured, steps_to_keep
from runner.core.errors import SpecError

VALUES = st.dictionaries(st.integers(1, 50), st.floats(), max_size=10)


def test_the_oldest_of_equals_is_the_best() -> None:
    metrics = {3: {"m": 1.0}, 1: {"m": 2.0}, 2: {"m": 2.0}, 4: {"m": math.nan}, 5: {"other": 9.0}}
    assert best_step(metrics, "m", "max") == 1
    assert best_step(metrics, "m", "min") == 3
    assert best_step(metrics, "absent", "max") is None
    assert best_step({}, "m", "max") is None


@pytest.mark.parametrize(
    ("metric", "best"),
    [("eval/loss", 1), ("train/loss", 1), ("eval/exact_match", 2), ("eval/accuracy", 2), ("reward/mean", 2)],
)
def test_the_name_says_whether_more_is_better(metric: str, best: int) -> None:
    metrics = {1: {metric: 1.0}, 2: {metric: 2.0}, 3: {metric: 1.5}}
    assert best_step(metrics, metric, None) == best
    assert direction(metric) is not None and CheckpointConfig(name="c", best=metric).problems(JOB) == []


def test_a_metric_that_an_evaluation_lacks_is_an_error_that_names_what_there_is() -> None:
    plain, evaluated = {"train/loss": 1.0}, {"train/loss": 1.0, "eval/loss": 2.0, "eval/exact_match": 0.5}
    with pytest.raises(SpecError, match=r"best: eval/acc is not measured; .* eval/exact_match, eval/loss, train/loss"):
        refuse_unmeasured("eval/acc", [plain, evaluated])
    refuse_unmeasured("eval/acc", [plain])
    refuse_unmeasured("eval/acc", [evaluated, {"eval/acc": 0.5}])
    refuse_unmeasured("eval/reward/mean", [evaluated | {"eval/reward/num_failed": 4.0}])
    refuse_unmeasured("reward/mean", [evaluated])  # a step in which no group could be scored lacks it


JOB = SimpleNamespace(evaluation=SimpleNamespace(every=5))


def test_problems() -> None:
    def said(**options: Any) -> dict[str, str]:
        return dict(CheckpointConfig(name="c", **options).problems(JOB))

    assert said() == said(best="eval/loss") == said(best="mine/x", best_mode="min") == {}
    assert said(best_mode="min") == {"checkpoint.best_mode": "needs checkpoint.best; leave it out"}
    assert "must be set to max or min" in said(best="mine/x")["checkpoint.best_mode"]
    assert "must be set" in said(best="reward/std")["checkpoint.best_mode"]


@given(VALUES)
def test_nothing_is_better_than_the_best(values: dict[int, float]) -> None:
    numbers = {s: v for s, v in values.items() if not math.isnan(v)}
    metrics = {s: {"m": v} for s, v in values.items()}
    for mode, extreme in (("max", max), ("min", min)):
        best = best_step(metrics, "m", mode)
        assert (best is None) == (not numbers)
        if best is not None:
            target = extreme(numbers.values())
            assert best == min(s for s, v in numbers.items() if v == target)


@given(st.sets(st.integers(1, 99)), st.integers(1, 5))
def test_the_newest_and_the_best_are_kept(steps: set[int], keep: int) -> None:
    best = min(steps, default=None)
    stay = steps_to_keep(steps, keep, best)
    assert stay <= steps
    assert len(stay) <= keep + 1
    assert stay - {best} == set(sorted(steps, reverse=True)[:keep]) - {best}
    assert best is None or best in stay
