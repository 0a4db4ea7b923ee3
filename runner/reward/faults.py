"""What could not be scored and why: said once per kind, counted, and an error when nothing is scored any more."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from runner.core.errors import DataError, RunnerError

log = logging.getLogger("runner")
MOST_KINDS = 20  # said one by one; a scorer that fails in more ways than that is only counted


class Unscorable(Exception):
    """A sample cannot be scored. `kind` is the sort of reason, `message` the reason in words."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Fault:
    """Why `samples` samples of a group have no score."""

    kind: str
    message: str
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of one group, None where there is none, and the faults behind those."""

    values: list[float | None]
    faults: tuple[Fault, ...] = ()


def unscored(size: int, kind: str, message: str) -> Scored:
    """A group of which no sample has a score, for one reason."""
    return Scored([None] * size, (Fault(kind, message, size),))


class Faults:
    """Keeps account of a reward's faults."""

    def __init__(self, label: str, max_failures: int, remedy: str, error: type[RunnerError] = DataError) -> None:
        self._label, self._remedy, self._error = label, remedy, error
        self._max_failures = max_failures
        self._in_a_row = 0  # groups of which no sample could be scored
        self._samples = 0
        self._counts: Counter[str] = Counter()

    def take(self, scored: Scored) -> list[float | None]:
        """Count a group and return its scores. Raises `error` after `max_failures` groups in a row without a score."""
        for fault in scored.faults:
            self._say(fault)
        self._samples += len(scored.values)
        lost = sum(fault.samples for fault in scored.faults)
        if lost < len(scored.values) or not lost:
            self._in_a_row = 0 if scored.values else self._in_a_row
            return scored.values
        self._in_a_row += 1
        if self._in_a_row >= self._max_failures:
            raise self._error(
                f"{self._label}: no sample of {self._in_a_row} groups in a row could be scored; the last reason:\n"
                f"  {scored.faults[-1].message}\n  {self._remedy}"
            )
        return scored.values

    def close(self) -> None:
        """Say how many samples had no score, by kind."""
        if self._counts:
            kinds = "; ".join(f"{count} × {kind}" for kind, count in self._counts.most_common())
            total = self._counts.total()
            log.warning("%s: %d of %d samples could not be scored: %s", self._label, total, self._samples, kinds)
        self._counts.clear()

    def _say(self, fault: Fault) -> None:
        kind = fault.kind if fault.kind in self._counts or len(self._counts) < MOST_KINDS else "other reasons"
        if kind not in self._counts:
            log.warning("%s: not scored: %s", self._label, fault.message)
        self._counts[kind] += fault.samples
