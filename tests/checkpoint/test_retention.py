"""Which checkpoints stay."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from runner.checkpoint.retention import best_step, kept

VALUES = st.dictionaries(st.integers(1, 50), st.floats(), max_size=10)


def test_the_oldest_of_equals_is_the_best() -> None:
    metrics = {3: {"m": 1.0}, 1: {"m": 2.0}, 2: {"m": 2.0}, 4: {"m": math.nan}, 5: {"other": 9.0}}
    assert best_step(metrics, "m", "max") == 1
    assert best_step(metrics, "m", "min") == 3
    assert best_step(metrics, "absent", "max") is None
    assert best_step({}, "m", "max") is None


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
    stay = kept(steps, keep, best)
    assert stay <= steps
    assert len(stay) <= keep + 1
    assert stay - {best} == set(sorted(steps, reverse=True)[:keep]) - {best}
    assert best is None or best in stay
