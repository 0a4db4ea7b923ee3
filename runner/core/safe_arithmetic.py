"""Arithmetic in text: parsed into a syntax tree and evaluated here, never executed. Exact fractions.

There are whole numbers, + - * / and brackets, and nothing else.
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

EXPRESSION = re.compile(r"[0-9+\-*/() ]{1,300}")  # short enough that no nesting is too deep
SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class NotArithmetic(ValueError):
    """The text is no arithmetic expression, or has no value; says why."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression and the numbers in it. Raises NotArithmetic."""
    expression = text.translate(SIGNS).strip()
    if not EXPRESSION.fullmatch(expression):
        raise NotArithmetic("only whole numbers, + - * / and brackets are known")
    numbers: list[int] = []
    try:
        return _walk(ast.parse(expression, mode="eval").body, numbers), numbers
    except ZeroDivisionError as error:
        raise NotArithmetic("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotArithmetic("not an expression") from error


def _walk(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub()):
            return -_walk(node.operand, numbers)
        case ast.BinOp() if type(node.op) in OPERATORS:
            result: Fraction = OPERATORS[type(node.op)](_walk(node.left, numbers), _walk(node.right, numbers))
            return result
    raise NotArithmetic("only whole numbers, + - * / and brackets are known")
