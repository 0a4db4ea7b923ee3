"""Whether an answer is mathematically equal to the right one. Runs in a worker; needs math-verify.

    right answer ─▶ after #### (GSM8K) ─▶ \\boxed{…}, one formula; a sentence around formulas is read like an answer
    answer       ─▶ after </think> ─▶ its \\boxed{…} alone; without one, what math-verify finds

Departures from math-verify: of a `\\boxed` that cannot be read, its text is compared, where math-verify takes a number
from anywhere in the answer. Both sides are first written in the form that it reads (`PLAIN`), a percentage also counts
as its number, as in the MATH data: 25\\% is 25, and fractions are compared exactly, where it rounds to 6 digits.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-not-found,import-untyped,unused-ignore]

from runner.core.untrusted_text import shorten

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off: ours kill it
FORMULA = re.compile(r"(?<!\\)\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
WORD = re.compile(r"(?!(?:and|or)\b)\b[A-Za-z]{2,}")
TYPED = str.maketrans(
    {
        "×": r"\times ",
        "·": r"\cdot ",
        "√": r"\sqrt ",
        "²": "^2",
        "³": "^3",
        "½": r"\frac12",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∪": r"\cup ",
    }
)
PERCENT = re.compile(r"\s*\\?%")
PLAIN = (
    (re.compile(r"\\(?:begin|end)\{(?:aligned|align\*?|equation\*?|gathered|gather\*?)\}|(?<=[a-z\s])&(?==)"), ""),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"\\degree\b"), r"^{\\circ}"),
    (re.compile(r"\\(?:mathbf|boldsymbol|vec|hat)\s*\{([A-Za-z])\}"), r" \1 "),  # or a vector is taken for a unit
    (re.compile(r"\\([lr])angle\b"), lambda found: "()"[found[1] == "r"]),
    (re.compile(r"(?<=\d)i(?![A-Za-z])"), " i"),  # or the i of 2i is a variable
    (re.compile(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))"), ""),  # 12\,345
    (re.compile(r"(?<=\S)(\s*[-+=])\s+(?=[a-z](?![A-Za-z]))"), r"\1"),  # or the c of `a + b + c` is taken for a unit
    (re.compile(r"(?:\.|\\\\|\s)+(?=\}(?:\$|\\[\])])*\.?\s*$)"), ""),  # the end of a sentence or line inside \boxed{…}
)


def score(answers: Sequence[str], wanted: Sequence[str]) -> list[float]:
    """1 where equal, else 0. Raises ValueError for a right answer that cannot be read."""
    return [_score(answer, right) for answer, right in zip(answers, wanted, strict=True)]


def _score(answer: str, right: str) -> float:
    gold = parse_expected(right)
    if not gold:
        raise ValueError(f"the correct answer is not a mathematical expression: {shorten(right, 80)!r}")
    if answer.strip() == right.strip():
        return 1.0
    found = _parse_text(answer.rpartition("</think>")[2])
    if not found or not verify(gold, found, timeout_seconds=None):
        return 0.0
    exact, given = _fractions(gold), _fractions(found)
    return float(not exact or not given or any(a == b for a in exact for b in given))


def _fractions(readings: Sequence[Any]) -> list[Any]:
    """The values of the readings that are exact rational numbers."""
    values = [one.doit() for one in readings if getattr(one, "is_number", False)]  # of sympy; some are text
    return [value for value in values if value.is_Rational]


def parse_expected(right: str) -> list[Any]:
    """Every reading of the right answer, of which an answer has to equal one; empty where there is none."""
    text = right.rpartition("####")[2].strip()
    if not text or "\\boxed" in text or (FORMULA.search(text) and WORD.search(FORMULA.sub("", text))):
        return _parse_text(text)
    formula = FORMULA.sub(lambda found: next(filter(None, found.groups())), text)
    return _parse_text(f"\\boxed{{{formula}}}")


def _parse_text(text: str) -> list[Any]:
    """What the text gives as its answer: its last box, or else the last formula or number."""
    text = text.translate(TYPED)
    for pattern, replacement in PLAIN:
        text = pattern.sub(replacement, text)
    found: list[Any] = []
    for form in dict.fromkeys((text, PERCENT.sub("", text))):
        if "\\boxed" in form:
            found += parse(form, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
        else:
            found += parse(form, parsing_timeout=None)
    return found
