"""Columns of rows: renamed as the user says, and those left out that are no JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from runner.data.rows import Problems, Row


class Renaming:
    """`data.columns`: name in the data → name that a format or a reward knows; `seen` is what was there of it."""

    def __init__(self, columns: Mapping[str, str] | None) -> None:
        self.columns = dict(columns or {})
        self.seen: set[str] = set()

    def apply(self, rows: Iterable[Row], problems: Problems) -> Iterator[Row]:
        """Each row with its new names; a row that has one of them already is a problem."""
        for row in rows:
            self.seen |= self.columns.keys() & row.value.keys()
            value = {self.columns.get(name, name): content for name, content in row.value.items()}
            if len(value) == len(row.value):
                yield replace(row, value=value)
            else:
                problems.add(row.place, self._collision(row.value))

    def _collision(self, value: Mapping[str, Any]) -> str:
        old, new = next((o, n) for o, n in self.columns.items() if o in value and n in value and n not in self.columns)
        return f"data.columns renames `{old}` to `{new}`, and the row has a `{new}` already; rename that one too"


def is_json(value: Any) -> bool:
    """Whether `value` can be written as JSON: no dates, bytes or NaN, which Parquet and the hub may hold."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
