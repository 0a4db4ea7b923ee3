"""Whether an answer is mathematically equal to the right one. Runs in a worker; needs math-verify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-not-found,import-untyped,unused-ignore]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off: ours kill it
LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[", "\\begin")


def score(answers: Sequence[str], wanted: Sequence[str]) -> list[float]:
    """1 where equal, else 0. Raises ValueError for a right answer that cannot be read."""
    return [_score(answer, right) for answer, right in zip(answers, wanted, strict=True)]


def _score(answer: str, right: str) -> float:
    gold = parse_expected(right)
    if not gold:
        raise ValueError(f"the correct answer is not a mathematical expression: {right[:80]!r}")
    found = parse(answer, parsing_timeout=None)
    return float(bool(found) and verify(gold, found, timeout_seconds=None))


def parse_expected(right: str) -> Any:
    """The right answer: what follows #### (GSM8K) if present; without LaTeX marks it is one formula."""
    text = right.rpartition("####")[2].strip()
    if not text or any(mark in text for mark in LATEX_MARKS):
        return parse(text, parsing_timeout=None)
    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
