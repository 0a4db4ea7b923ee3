"""The countdown game: an arithmetic expression of given numbers that makes a target.

What an expression may be, see `runner.core.safe_arithmetic`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from runner.core.safe_arithmetic import NotArithmetic, evaluated
from runner.interfaces import Completion
from runner.reward.config import CountdownConfig
from runner.reward.faults import Faults, Unscorable
from runner.reward.patterns import last
from runner.reward.scorer import Scorer, column, each


def value(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None if it has no value. What stands after = is not read."""
    try:
        return evaluated(expression.partition("=")[0])
    except NotArithmetic:
        return None


def solves(expression: str, numbers: Sequence[int], target: Fraction, use_all: bool = True) -> bool:
    """Whether the expression makes the target from the numbers, each exactly once, or else at most once."""
    found = value(expression)
    if found is None or found[0] != target:
        return False
    used, given = Counter(found[1]), Counter(numbers)
    return used == given if use_all else used <= given


def build(config: CountdownConfig, **_: Any) -> Scorer:
    """The reward; what is no expression scores 0."""

    def rate(completion: Completion) -> float:
        numbers = _numbers(column(completion, config.numbers, "numbers"), config.numbers)
        [target] = _numbers([column(completion, config.target, "target")], config.target)
        text = completion.text if config.extract is None else last(config.extract, completion.text)
        return float(text is not None and solves(text, numbers, Fraction(target), config.use_all))

    remedy = "set reward.numbers and reward.target to columns of the data"
    return Scorer(each(rate), Faults("reward=countdown", config.max_failures, remedy))


def _numbers(values: Any, name: str) -> list[int]:
    if isinstance(values, list | tuple) and values and all(type(v) is int for v in values):
        return list(values)
    raise Unscorable(f"column {name} is unusable", f"column '{name}' holds no whole numbers but {str(values)[:80]}")
