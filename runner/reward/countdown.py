"""The countdown game: an arithmetic expression of given numbers that makes a target.

The expression is read into a syntax tree and walked here; nothing of it is run. There are numbers, + - * /
and brackets, and nothing else. Fractions are exact.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from runner.protocols import Completion
from runner.reward.config import CountdownConfig
from runner.reward.faults import Faults, Unscorable
from runner.reward.patterns import last
from runner.reward.scorer import Scorer, column, each

EXPRESSION = re.compile(r"[0-9+\-*/() ]{1,300}")  # short enough that no nesting is too deep
SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})


class _NoExpression(Exception):
    """Not an arithmetic expression with a value."""


def value(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None if it has no value. What stands after = is not read."""
    text = expression.partition("=")[0].translate(SIGNS).strip()
    if not EXPRESSION.fullmatch(text):
        return None
    numbers: list[int] = []
    try:
        return _walk(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, _NoExpression):
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


def _walk(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub()):
            return -_walk(node.operand, numbers)
        case ast.BinOp():
            left, right = _walk(node.left, numbers), _walk(node.right, numbers)
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.Mult():
                    return left * right
                case ast.Div():
                    return left / right
    raise _NoExpression
