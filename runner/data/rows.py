"""Rows of data, the places they stand at, and the list of what is wrong with them.

Row = (Place, columns)          Problems: every fault found, raised as one DataError
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.core.errors import DataError

SHOWN = 10  # problems that a message spells out; the rest is counted


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: a file and a 1-based line, or a source without lines and a 1-based row."""

    source: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.source}:{self.number}" if self.unit == "line" else f"{self.source}: {self.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read: column name → value, not yet checked against a format."""

    place: Place
    value: Mapping[str, Any]


class Problems:
    """Collects what is wrong with a source, so that the user sees up to ten faults at once and their number."""

    def __init__(self, key: str, source: str) -> None:
        self.key = key  # the option that named the source, e.g. data.path
        self.source = source
        self.count = 0
        self._shown: list[str] = []
        self._hints: dict[str, None] = {}

    def add(self, place: Place | str, message: str, hint: str = "") -> None:
        """One more fault; `hint` says what to type next and is shown once below all faults."""
        self.count += 1
        if len(self._shown) < SHOWN:
            self._shown.append(f"{place}: {message}")
        if hint:
            self._hints[hint] = None

    def error(self) -> DataError:
        """All of it as one error."""
        head = f"{self.key}={self.source}: {self.count} problem{'s' if self.count != 1 else ''}"
        if self.count > len(self._shown):
            head += f" (the first {len(self._shown)})"
        return DataError("\n  ".join([head, *self._shown, *self._hints]))

    def raise_if_any(self) -> None:
        """Raise DataError if anything was added."""
        if self.count:
            raise self.error()
