"""Keys of a message beside its role and content: whether it is trained on, and what nothing reads.

Sources of the flags: the formats of OpenAI's fine-tuning, ms-swift, verl, axolotl and torchtune.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
# Keys of a message that say whether it is trained on → the value that says so.
TRAIN_FLAGS: Mapping[str, int] = {
    "weight": 1,  # OpenAI
    "loss": 1,  # ms-swift
    "trainable": 1,  # verl
    "loss_mask": 1,  # verl
    "train": 1,  # axolotl
    "training": 1,  # axolotl
    "masked": 0,  # torchtune
}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # one text under three names
# Keys that are read, and those that say nothing to a model.
KNOWN_KEYS = frozenset({"role", "content", "tool_calls", "name", "id", "tool_call_id", *TRAIN_FLAGS, *REASONING_KEYS})


def is_trained(message: Message) -> bool:
    """Whether an assistant turn is trained on: unless a flag of its own says no."""
    return not excluding_flags(message)


def excluding_flags(message: Message) -> list[str]:
    """The flags of a message which say that it is not trained on, as `key: value`."""
    flags = _flags(message).items()
    return [f"{key}: {json.dumps(value, default=str)}" for key, value in flags if value != TRAIN_FLAGS[key]]


def unused_keys(messages: Sequence[Message]) -> set[str]:
    """Keys of messages that nothing here reads; a flag that asks to train on a turn of another role too."""
    unknown = {str(key) for message in messages for key in message.keys() - KNOWN_KEYS}
    others = [message for message in messages if message.get("role") != "assistant"]
    return unknown | {
        f"{key} (role {message.get('role')})"
        for message in others
        for key, value in _flags(message).items()
        if value == TRAIN_FLAGS[key] and key != "masked"
    }


def _flags(message: Message) -> dict[str, Any]:
    return {key: message[key] for key in TRAIN_FLAGS if message.get(key) is not None}


def flag_fault(message: Message) -> str | None:
    """What is wrong with the training flags of a message."""
    flags = _flags(message)
    for key, value in flags.items():
        if value not in (0, 1):
            return f".{key}: expected true or false, or 1 or 0, found {value!r}"
    if len({value == TRAIN_FLAGS[key] for key, value in flags.items()}) > 1:
        said = ", ".join(f"{key}: {json.dumps(value)}" for key, value in flags.items())
        return f": {said} contradict each other; expected one of them"
    return None


def openai_tool_schema(tool: Message) -> Message:
    """A tool's schema as chat templates read it; LLaMA-Factory and ms-swift have its inner part."""
    if "name" not in tool or "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
