"""data.holdout: a fraction of a source's rows for evaluation, chosen by what they say.

    key of a row    hash of its prompt, or of all columns of its format where it has no column `prompt`
    held out        the keys up to the quantile `fraction` of all distinct keys

So the choice depends on no seed and no order, equal rows (and all rows of one prompt) are on one side, and the number
of distinct keys that are held out is exact, at least one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from runner.core.errors import DataError

if TYPE_CHECKING:
    from runner.data.formats import Format
    from runner.data.readers import Row


def row_key(form: Format, row: Row) -> int:
    """64 bits of the sha256 of what decides the row's side."""
    columns = ("prompt",) if "prompt" in form.columns else form.columns
    text = json.dumps([row.value.get(name) for name in columns], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Holdout:
    """The held-out rule of one source. `read_keys` reads all rows; `where` is for error messages."""

    fraction: float
    where: str
    read_keys: Callable[[], set[int]]

    @cached_property
    def cutoff_key(self) -> int:
        """The largest key that is held out. Raises DataError where no row would be left to train on."""
        keys = sorted(self.read_keys())
        count = max(1, round(self.fraction * len(keys)))
        if count >= len(keys):
            raise DataError(
                f"data.holdout={self.fraction:g} of {self.where}: {len(keys)} distinct rows or prompts leave no "
                "training data; lower it, or set separate held-out rows (data.eval_path, data.eval_split)"
            )
        return keys[count - 1]

    def is_held_out(self, form: Format, row: Row) -> bool:
        """Whether the row is for evaluation."""
        return row_key(form, row) <= self.cutoff_key
