"""The arguments of a call, by the names and defaults of an operator's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def bound(schema: Any, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of `schema` (a torch.FunctionSchema) with its value. Raises TypeError if the call does not fit."""
    named = {argument.name: argument for argument in schema.arguments}
    positions = [name for name, argument in named.items() if not argument.kwarg_only]
    if len(args) > len(positions):
        raise TypeError(f"{schema.name} takes {len(positions)} arguments by position, not {len(args)}")
    given = dict(zip(positions, args, strict=False))
    if wrong := sorted((options.keys() - named.keys()) | (options.keys() & given.keys())):
        raise TypeError(f"{schema.name} has no parameter {', '.join(wrong)}; it has {', '.join(named)}")
    given |= options
    for name, argument in named.items():
        if name not in given:
            if not argument.has_default_value():
                raise TypeError(f"{schema.name} needs {name}")
            given[name] = argument.default_value
    return given
