"""A group of answers as a reward function or service gets it: TRL's arguments, as plain JSON values.

prompts, completions: texts, or lists of messages where the data has messages
completion_ids: token ids      every column of the data: one value per answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.core.errors import DataError
from runner.reward.base import RESERVED_ARGUMENTS

if TYPE_CHECKING:
    from runner.interfaces import Completion


def reward_arguments(group: Sequence[Completion]) -> dict[str, Any]:
    """name → one value per answer of the group. Raises DataError for a column named like an argument."""
    columns = dict.fromkeys(name for completion in group for name in completion.prompt.columns)
    for name in RESERVED_ARGUMENTS:
        if name in columns:
            raise DataError(f"the data has a column '{name}', which a reward gets from the run\n  rename the column")
    return {
        "prompts": [_prompt(c) for c in group],
        "completions": [_completion(c) for c in group],
        "completion_ids": [list(c.ids) for c in group],
        **{name: [c.prompt.columns.get(name) for c in group] for name in columns},
    }


def encode_json(content: Mapping[str, Any]) -> bytes:
    """JSON, ASCII only. Raises DataError for a value that JSON has no form for."""
    try:
        return json.dumps(content).encode("ascii")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a column of the data cannot be given to the reward as JSON: {error}\n"
            "  make it text, numbers, lists and objects, or leave it out"
        ) from error


def _prompt(completion: Completion) -> str | list[dict[str, Any]]:
    messages = completion.prompt.messages
    return completion.prompt.text if messages is None else [dict(m) for m in messages]


def _completion(completion: Completion) -> str | list[dict[str, Any]]:
    """The text, or the messages that came after the prompt's."""
    before = completion.prompt.messages
    if before is None:
        return completion.text
    if completion.messages is None:
        return [{"role": "assistant", "content": completion.text}]
    return [dict(m) for m in completion.messages[len(before) :]]
