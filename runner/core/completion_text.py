"""The text of a completion, as rewards, environments and exact match read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def completion_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The ids' text with its special tokens, but for one at the end, which ends the turn."""
    ids = list(ids)
    if tokenizer.decode(ids[-1:], skip_special_tokens=True) != tokenizer.decode(ids[-1:]):
        ids.pop()
    return str(tokenizer.decode(ids))
