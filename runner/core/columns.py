"""Columns of a row by name. A dotted name reads inside objects: reward_model.ground_truth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
MOST_NAMES = 8  # keys that a message names


def column_value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or None where the row has none; a key of the whole name comes first."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head) if dot else None
    return column_value(inner, rest) if isinstance(inner, Mapping) else None


def nested_names(name: str, value: Any) -> Iterator[str]:
    """The dotted names of the values inside the objects of a column, in their order."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            path = f"{name}.{key}"
            yield from nested_names(path, inner) if isinstance(inner, Mapping) and inner else (path,)


def json_type_name(value: Any) -> str:
    """The word for the JSON type of `value`; an object with its keys."""
    if isinstance(value, dict) and value:
        more = ", …" if len(value) > MOST_NAMES else ""
        return f"an object with the keys {', '.join(map(str, list(value)[:MOST_NAMES]))}{more}"
    return KINDS.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
