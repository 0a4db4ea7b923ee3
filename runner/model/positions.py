"""How long a row may be before a model stops computing what it was made for.

Two kinds of rotary positions choose their frequencies by the longest row of the whole call: `dynamic` beyond
max_position_embeddings, `longrope` beyond original_max_position_embeddings. There the numbers of a row, and so the
update, would depend on what shares its micro-batch; up to there they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.errors import Problem, SpecError


def longest_row(config: Any) -> tuple[int, str] | None:
    """The most tokens of a row for the model with this transformers config, and why; None = no limit."""
    text = config.get_text_config()
    limits = []
    if (positions := getattr(text, "max_position_embeddings", None)) is not None:
        limits.append((positions, f"the model has {positions} positions"))
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        kind = str(rope.get("rope_type"))
        reason = f"beyond, its {kind} positions depend on the longest row of a micro-batch"
        if "dynamic" in kind and positions is not None:
            limits.append((positions - 1, reason))  # only shorter rows undo what a longer answer has changed
        elif kind == "longrope":
            limits.append((rope["original_max_position_embeddings"], reason))
    return min(limits, default=None)


def room(prompt: int, wanted: int, limit: tuple[int, str] | None) -> int:
    """How many of `wanted` new tokens fit behind a prompt of `prompt` tokens, by `longest_row`."""
    return wanted if limit is None else max(0, min(wanted, limit[0] - prompt))


def check_rows(longest: int, limit: tuple[int, str] | None) -> None:
    """Raise SpecError if rows of `longest` tokens are more than `longest_row` allows."""
    if limit is not None and longest > limit[0]:
        text = f"rows of {longest} tokens are too long: {limit[1]}; {limit[0]} is the most, prompt and answer together"
        raise SpecError([Problem("data.max_length", text)])


def _ropes(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of each kind of layer; most models have one for all."""
    return [v for v in parameters.values() if isinstance(v, Mapping)] or [parameters]
