"""Nested data by dotted keys, and who set each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

COMMAND_LINE = "command line"


def leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted key; lists are leaves, an empty section is one too."""
    if isinstance(data, Mapping) and (data or not prefix):
        for name, value in data.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, data


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """Who set `key`, or the part of it, or the whole that it is in; empty if it is the schema's default."""
    key = key.partition("[")[0]  # a list is one value
    if key in origins:
        return origins[key]
    inside = [who for other, who in origins.items() if other.startswith(f"{key}.")]
    if inside:
        return origins.get(f"{key}.name", inside[-1])
    parent, _, leaf = key.rpartition(".")
    return origin_of(parent, origins) if leaf and parent in origins else ""


def at(data: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key. Raises KeyError where there is none."""
    value: Any = data
    for name in key.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[name]
    return value
