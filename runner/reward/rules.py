"""Rewards computed from the text by a rule: exact, format, length, numeric, countdown; and none.

The length is counted in tokens, the end token included:

overlong (DAPO, 2503.14476, section 3.4):            target:
  0 ────────┐                                          0        ╱╲
             ╲                                                 ╱  ╲
 -1           └───────                                -1 _____╱    ╲_____
            m-b m                                           0 target 2·target
m = max_length, b = overlong_buffer_len
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import regex  # type: ignore[import-untyped]  # Python's own `re` cannot be stopped

from runner.core.untrusted_text import NotArithmetic, evaluate, shorten
from runner.interfaces.rewards import (
    GroupScorer,
    ScoringFailures,
    UnscorableError,
    require_column,
    require_text,
    score_each,
)
from runner.reward.config import (
    CountdownConfig,
    EnvironmentRewardConfig,
    ExactConfig,
    ExtractConfig,
    FormatConfig,
    LengthConfig,
    NoRewardConfig,
    NumericConfig,
)

if TYPE_CHECKING:
    from runner.interfaces import Completion

# Text before the fence, the fence, the first word of its info string: CommonMark has no backtick in either text.
FENCE = re.compile(r"([^`]*)(`{3,})[^\S\n]*(\w*)[^`]*")
PYTHON = re.compile(r"python[0-9]*|py[0-9]*", re.IGNORECASE)
SEARCH_S = 2.0  # of a regular expression of the user's, run on text of the model's: some never end


def pattern_fault(pattern: str, groups: int | None = None) -> str | None:
    """What is wrong with a pattern that has to have `groups` groups; None if nothing is."""
    try:
        found = regex.compile(pattern, regex.DOTALL).groups
    except regex.error as error:
        return f"not a regular expression: {error}"
    if groups is not None and found != groups:
        return f"expected {groups} capturing group (…), found {found}; write (?:…) for a group that does not capture"
    return None


def is_full_match(pattern: str, text: str) -> bool:
    """Whether the whole text matches. Raises UnscorableError after SEARCH_S seconds."""
    return _search(pattern, text, lambda known: known.fullmatch(text, timeout=SEARCH_S)) is not None


def last_match(pattern: str, text: str) -> str | None:
    """The group of the last match, or None. Raises UnscorableError after SEARCH_S seconds."""
    found = _search(pattern, text, lambda known: deque(known.finditer(text, timeout=SEARCH_S), maxlen=1))
    return found[0].group(1) if found else None


def _search(pattern: str, text: str, search: Callable[[Any], Any]) -> Any:
    try:
        return search(regex.compile(pattern, regex.DOTALL))
    except TimeoutError as error:
        where = f"a text of {len(text)} characters"
        advice = f"the pattern {pattern!r} took over {SEARCH_S:g} s on {where}; simplify it"
        raise UnscorableError("pattern too slow", advice) from error


def last_code_block(text: str) -> str | None:
    """The last closed block tagged as Python, or else without a tag, after </think>; None without one.

    Departures from CommonMark: text may precede an opening fence (`<answer>```python`), code a closing one that ends
    its line, and a fence with a tag begins a block even where the last one was not closed.
    """
    found: dict[bool, str] = {}  # by whether the block is tagged as Python
    fence, tag, indent, lines = "", "", "", list[str]()
    for line in text.rpartition("</think>")[2].split("\n"):
        mark = FENCE.fullmatch(line)
        is_code = mark is not None and mark[1].strip() and not line.rstrip().endswith(mark[2])
        if mark is None or (fence and (is_code or len(mark[2]) < len(fence))):
            lines.append(line.removeprefix(indent))
        elif fence and not mark[3]:
            lines += [mark[1].removeprefix(indent)] if mark[1].strip() else []
            if not tag or PYTHON.fullmatch(tag):
                found[bool(tag)] = "\n".join(lines)
            fence = ""
        else:
            indent, fence, tag, lines = mark[1], mark[2], mark[3], []
    return found.get(True, found.get(False))


def build_none(config: NoRewardConfig, **_: Any) -> None:
    """Nothing to build."""


def extract_answer(completion: Completion, config: ExtractConfig) -> str | None:
    """What `extract` finds in a completion, None where that is nothing; without it all of the text."""
    return completion.text if config.extract is None else last_match(config.extract, completion.text)


def is_equal(answer: str, wanted: str, ignore_case: bool = False) -> bool:
    """Whether two texts are the same but for blanks around them."""
    a, b = answer.strip(), wanted.strip()
    return a.casefold() == b.casefold() if ignore_case else a == b


def build_exact(config: ExactConfig, **_: Any) -> GroupScorer:
    """The reward; an answer in which `extract` finds nothing scores 0."""

    def rate(completion: Completion) -> float:
        wanted = require_text(completion, config.column, "column")
        answer = extract_answer(completion, config)
        return float(answer is not None and is_equal(answer, wanted, config.ignore_case))

    remedy = "set reward.column to a column of your data"
    return GroupScorer(score_each(rate), ScoringFailures("reward=exact", config.max_failures, remedy))


def build_environment(config: EnvironmentRewardConfig, **_: Any) -> GroupScorer:
    """The reward; an episode whose environment has no score is not scored."""

    def rate(completion: Completion) -> float:
        score = None if completion.environment is None else completion.environment.score
        if score is None:
            raise UnscorableError("no score", "the environment gave the episode no score")
        return score

    remedy = 'let score() return a number, or the program print {"reward": NUMBER} as its last line'
    return GroupScorer(score_each(rate), ScoringFailures("reward=environment", config.max_failures, remedy))


def build_format(config: FormatConfig, **_: Any) -> GroupScorer:
    """The reward: 1 where `pattern` matches the whole text, else 0."""
    ask = score_each(lambda completion: float(is_full_match(config.pattern, completion.text)))
    return GroupScorer(ask, ScoringFailures("reward=format", config.max_failures, "simplify reward.pattern"))


def soft_overlong_penalty(length: int, max_length: int, buffer_len: int) -> float:
    """DAPO's soft overlong punishment: 0 up to max_length - buffer_len tokens, -1 above max_length."""
    return min(0.0, max(-1.0, (max_length - buffer_len - length) / buffer_len))


def target_length_reward(length: int, target: int) -> float:
    """0 at the target, falling in a straight line to -1 at no tokens and at twice the target."""
    return -min(1.0, abs(length - target) / target)


def build_length(config: LengthConfig, **_: Any) -> GroupScorer:
    """The length reward; `problems` requires a target, or else max_length and overlong_buffer_len."""

    def rate(completion: Completion) -> float:
        if config.target is not None:
            return target_length_reward(len(completion.ids), config.target)
        assert config.max_length is not None and config.overlong_buffer_len is not None
        return soft_overlong_penalty(len(completion.ids), config.max_length, config.overlong_buffer_len)

    return GroupScorer(score_each(rate), ScoringFailures("reward=length", 1, ""))


# A sign counts unless it stands after a number, a letter or a bracket: the last number of "5-3" is 3.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z).])[-+−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
    r"|(?:(?<![0-9A-Za-z).])[-+−])?\.[0-9]+"
)
# Exact far beyond any answer, and bounded: 1e9999999999 becomes infinity and not a number of that many digits.
STRUCTURES = ("{", "[")  # how the text of a mapping or a list begins: a number in it need not be the answer
EXACT = Context(prec=100, Emax=10_000, Emin=-10_000, traps=[])


def last_number(text: str) -> Decimal | None:
    """The last number of a text: 1,234.5 and -2e3 are numbers, of 3/4 it is the 4; None if there is none."""
    found = NUMBER.findall(text)
    return _finite(found[-1].replace(",", "").replace("−", "-")) if found else None


def is_close(a: Decimal, b: Decimal, tolerance: float) -> bool:
    """Whether |a - b| ≤ tolerance, computed with 100 digits."""
    return bool(EXACT.abs(EXACT.subtract(a, b)) <= Decimal(repr(tolerance)))


def expected_number(completion: Completion, name: str) -> Decimal:
    """The right number: the last one of the column's text. Raises UnscorableError if there is none."""
    text = require_text(completion, name, "column")
    number = last_number(text) if text.lstrip()[:1] not in STRUCTURES else None
    if number is None:
        raise UnscorableError("no number in the column", f"column '{name}' has no number but {shorten(text, 80)!r}")
    return number


def build_numeric(config: NumericConfig, **_: Any) -> GroupScorer:
    """The reward; an answer without a number scores 0."""

    def rate(completion: Completion) -> float:
        wanted = expected_number(completion, config.column)
        text = extract_answer(completion, config)
        number = last_number(text or "")
        return float(number is not None and is_close(number, wanted, config.tolerance))

    remedy = "set reward.column to a column of numbers"
    return GroupScorer(score_each(rate), ScoringFailures("reward=numeric", config.max_failures, remedy))


def _finite(text: str) -> Decimal | None:
    number = EXACT.create_decimal(text)
    return number if number.is_finite() else None


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and its numbers; None without a value. Text after = is not read."""
    try:
        return evaluate(expression.partition("=")[0])
    except NotArithmetic:
        return None


def solves(expression: str, numbers: Sequence[int], target: Fraction, use_all: bool = True) -> bool:
    """Whether the expression makes the target from the numbers, each exactly once, or else at most once."""
    found = evaluate_expression(expression)
    if found is None or found[0] != target:
        return False
    used, given = Counter(found[1]), Counter(numbers)
    return used == given if use_all else used <= given


def build_countdown(config: CountdownConfig, **_: Any) -> GroupScorer:
    """The reward; what is no expression scores 0."""

    def rate(completion: Completion) -> float:
        numbers = _numbers(require_column(completion, config.numbers, "numbers"), config.numbers)
        [target] = _numbers([require_column(completion, config.target, "target")], config.target)
        text = extract_answer(completion, config)
        return float(text is not None and solves(text, numbers, Fraction(target), config.use_all))

    remedy = "set reward.numbers and reward.target to columns of the data"
    return GroupScorer(score_each(rate), ScoringFailures("reward=countdown", config.max_failures, remedy))


def _numbers(values: Any, name: str) -> list[int]:
    if isinstance(values, list | tuple) and values and all(type(v) is int for v in values):
        return list(values)
    raise UnscorableError(
        f"column {name} has no integers", f"column '{name}' has no list of integers but {shorten(str(values), 80)}"
    )
