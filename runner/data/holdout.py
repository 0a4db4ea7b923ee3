"""data.holdout: a fraction of the rows for evaluation, chosen by what they say.

    key of a row    hash of its group (data.holdout_group), else of its prompt and its images (the prompt of a pair
                    without one is its common start), else of all columns of its format
    held out        of each source, the keys up to the quantile `fraction` of its distinct keys; in every source

So the choice depends on no seed and no order, equal rows (all rows of one prompt, or of one group) are on one side also
where several sources have them, and at least one key of each source is held out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runner.core.columns import column_value
from runner.core.errors import DataError
from runner.data.examples import RowError, count_common_characters, count_common_messages, is_messages
from runner.data.images import COLUMNS as IMAGE_COLUMNS

if TYPE_CHECKING:
    from runner.data.formats import Format
    from runner.data.readers import Row

ReadKeys = Callable[[], set[int]]


ASSISTANT = "\n\nAssistant:"  # of hh-rlhf: what both texts have after it is of their answers


def row_key(form: Format, row: Row, group: str | None = None) -> int:
    """64 bits of the sha256 of what decides the row's side. Raises RowError for a row without a group."""
    if group is None:
        columns = ("prompt",) if "prompt" in form.columns else form.columns
        values = [row.value.get(name) for name in columns]
        if columns == ("chosen", "rejected"):
            values = [_common_prefix(*values)]
        values += [row.value[name] for name in IMAGE_COLUMNS if row.value.get(name)]
    elif (value := column_value(row.value, group)) is None:
        raise RowError(f"no column {group}; data.holdout_group needs one in every row")
    else:
        values = [value]
    text = json.dumps(values, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _common_prefix(chosen: Any, rejected: Any) -> Any:
    """The prompt of a pair that has no other; of a faulty row, both values."""
    if is_messages(chosen) and is_messages(rejected):
        return chosen[: count_common_messages(chosen, rejected)]
    if isinstance(chosen, str) and isinstance(rejected, str):
        text = chosen[: count_common_characters(chosen, rejected)]
        before, marker, _ = text.rpartition(ASSISTANT)
        return before + marker or text
    return [chosen, rejected]


@dataclass(frozen=True)
class Holdout:
    """The held-out rule of a job's sources.

    read_keys: source → function that reads the keys of all its rows; group: the column that keeps rows together;
    content: digest of all sources
    """

    fraction: float
    read_keys: Mapping[str, ReadKeys]
    content: str
    group: str | None = None

    @cached_property
    def held_out_keys(self) -> set[int]:
        """The keys that are held out. Raises DataError where a source would have no row left to train on."""
        keys = {where: read() for where, read in self.read_keys.items()}
        chosen = {key for some in keys.values() for key in sorted(some)[: max(1, round(self.fraction * len(some)))]}
        for where, some in keys.items():
            if some <= chosen:
                what = "groups" if self.group else "distinct rows or prompts"
                raise DataError(
                    f"data.holdout={self.fraction:g} of {where}: {len(some)} {what} leave no training data; lower it, "
                    "or set separate held-out rows (data.eval_path, data.eval_split)"
                )
        return chosen

    def is_held_out(self, form: Format, row: Row) -> bool:
        """Whether the row is for evaluation. Raises RowError for a row without a group."""
        return row_key(form, row, self.group) in self.held_out_keys
