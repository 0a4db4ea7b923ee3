"""The last number of the answer against a column of the data."""

from __future__ import annotations

import re
from decimal import Context, Decimal
from typing import Any

from runner.interfaces import Completion
from runner.reward.config import NumericConfig
from runner.reward.faults import Faults, Unscorable
from runner.reward.patterns import last
from runner.reward.scorer import Scorer, column, each

# A sign counts unless it stands after a number, a letter or a bracket: the last number of "5-3" is 3.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z).])[-+−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
    r"|(?:(?<![0-9A-Za-z).])[-+−])?\.[0-9]+"
)
# Exact far beyond any answer, and bounded: 1e9999999999 becomes infinity and not a number of that many digits.
EXACT = Context(prec=100, Emax=10_000, Emin=-10_000, traps=[])


def last_number(text: str) -> Decimal | None:
    """The last number of a text: 1,234.5 and -2e3 are numbers, of 3/4 it is the 4; None if there is none."""
    found = NUMBER.findall(text)
    return _finite(found[-1].replace(",", "").replace("−", "-")) if found else None


def near(a: Decimal, b: Decimal, tolerance: float) -> bool:
    """Whether |a - b| ≤ tolerance, computed with 100 digits."""
    return bool(EXACT.abs(EXACT.subtract(a, b)) <= Decimal(repr(tolerance)))


def reference(completion: Completion, name: str) -> Decimal:
    """The right number: the last one of the column's text. Raises Unscorable if there is none."""
    value = column(completion, name, "column")
    number = last_number(str(value)) if not isinstance(value, bool) else None
    if number is None:
        raise Unscorable("no number in the column", f"column '{name}' holds no number but {str(value)[:80]!r}")
    return number


def build(config: NumericConfig, **_: Any) -> Scorer:
    """The reward; an answer without a number scores 0."""

    def rate(completion: Completion) -> float:
        wanted = reference(completion, config.column)
        text = completion.text if config.extract is None else last(config.extract, completion.text)
        number = last_number(text or "")
        return float(number is not None and near(number, wanted, config.tolerance))

    return Scorer(each(rate), Faults("reward=numeric", config.max_failures, "set reward.column to a column of numbers"))


def _finite(text: str) -> Decimal | None:
    number = EXACT.create_decimal(text)
    return number if number.is_finite() else None
