"""Bounded parsing of text from outside: JSON, YAML, arithmetic; and its start or end for a message.

Deep nesting and alias growth end with ValueError. Arithmetic is parsed into a syntax tree and evaluated here, never
executed: exact fractions of whole numbers, + - * / and brackets. PyYAML is imported when a text needs it.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from fractions import Fraction
from typing import Any

DEEPEST = 100  # levels of mappings and lists inside one another
MOST_NODES = 100_000  # of a YAML text with expanded aliases


def shorten(text: str, most: int, *, end: bool = False) -> str:
    """The first or, with `end`, the last `most` characters, with … in place of the others."""
    if len(text) <= most:
        return text
    return f"…{text[-most:]}" if end else f"{text[:most]}…"


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is invalid or nested too deeply."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value


def without_nulls(value: Any) -> Any:
    """A JSON value without the keys whose value is null, at any depth.

    Arrow gives every object in a column the same keys and fills the missing ones with null, and `datasets` writes these
    into JSON. So a missing key and null mean the same.
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def check_depth(value: Any) -> None:
    """Raise ValueError for lists and objects nested too deeply for functions that call themselves."""
    level = [value]
    for _ in range(DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        if not (level := [part for parts in inner for part in parts if isinstance(part, dict | list)]):
            return
    raise ValueError("nested too deeply")


def check_yaml(text: str) -> None:
    """Raise ValueError if a YAML text is nested too deeply, or too large with expanded aliases.

    Invalid YAML passes: its parser reports the position.
    """
    if "*" not in text and sum(map(text.count, "[{-:")) < DEEPEST:
        return
    import yaml

    sizes: dict[str, int] = {}  # of each anchor's node, without aliases
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, values before it)
    total = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
                total += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor is not None:
                    sizes[anchor] = total - before
            elif isinstance(event, yaml.AliasEvent):
                total += sizes.get(event.anchor or "", 1)
            elif isinstance(event, yaml.ScalarEvent):
                total += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            line = event.start_mark.line + 1 if event.start_mark is not None else 0
            if len(open_nodes) > DEEPEST:
                raise ValueError(f"line {line}: nested more than {DEEPEST} levels deep")
            if total > MOST_NODES:
                raise ValueError(f"line {line}: more than {MOST_NODES} values, including aliases")
    except yaml.YAMLError:
        return


EXPRESSION = re.compile(r"[0-9+\-*/() ]{1,300}")  # short enough that no nesting is too deep
SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class NotArithmetic(ValueError):
    """The text is not an arithmetic expression, or has no value; the message says why."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression and the numbers in it. Raises NotArithmetic."""
    expression = text.translate(SIGNS).strip()
    if not EXPRESSION.fullmatch(expression):
        raise NotArithmetic("only integers, + - * / and brackets are supported")
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
    raise NotArithmetic("only integers, + - * / and brackets are supported")
