"""What a check answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

ANY_DEVICE = "any device"  # the group of checks that every device needs


class Verdict(StrEnum):
    """ok; warning = it works and something is to be known; problem = it cannot work; unknown; skipped; bug = ours."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check: what was seen, and what to type where something is to be done."""

    verdict: Verdict
    evidence: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding in the report: which check of which group made it."""

    group: str
    check: str
    finding: Finding

    def record(self) -> dict[str, str | None]:
        """As plain data."""
        return {"group": self.group, "check": self.check, **asdict(self.finding)}


def ok(evidence: str) -> Finding:
    """Nothing to do."""
    return Finding(Verdict.OK, evidence)


def warning(evidence: str, remedy: str | None = None) -> Finding:
    """It works, and something is to be known."""
    return Finding(Verdict.WARNING, evidence, remedy)


def problem(evidence: str, remedy: str) -> Finding:
    """It cannot work until the remedy is done."""
    return Finding(Verdict.PROBLEM, evidence, remedy)


def unknown(evidence: str, remedy: str | None = None) -> Finding:
    """Not established: the tables or the machine do not say."""
    return Finding(Verdict.UNKNOWN, evidence, remedy)


def skipped(evidence: str) -> Finding:
    """Does not apply here."""
    return Finding(Verdict.SKIPPED, evidence)
