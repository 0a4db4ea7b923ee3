"""The text of a completion, as rewards, environments and exact match read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def completion_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The ids' text with its special tokens, but for one at the end, which ends the turn."""
    tokens = np.asarray(ids, np.int64)  # of a list, transformers would check each element in Python
    last = tokens[-1:]
    if tokenizer.decode(last, skip_special_tokens=True) != tokenizer.decode(last):
        tokens = tokens[:-1]
    return str(tokenizer.decode(tokens))
