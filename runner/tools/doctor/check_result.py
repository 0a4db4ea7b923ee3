"""What a check answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

ANY_DEVICE = "any device"  # the group of checks that every device needs


class CheckStatus(StrEnum):
    """ok; warning = works, with a remark; problem = cannot work; unknown; skipped; bug = of this project."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The answer of one check: what was seen, and what to type where something is to be done."""

    verdict: CheckStatus
    evidence: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """A finding in the report: which check of which group made it."""

    group: str
    check: str
    finding: CheckResult

    def record(self) -> dict[str, str | None]:
        """As plain data."""
        return {"group": self.group, "check": self.check, **asdict(self.finding)}


def ok(evidence: str) -> CheckResult:
    """Nothing to do."""
    return CheckResult(CheckStatus.OK, evidence)


def warning(evidence: str, remedy: str | None = None) -> CheckResult:
    """It works, and something is to be known."""
    return CheckResult(CheckStatus.WARNING, evidence, remedy)


def problem(evidence: str, remedy: str) -> CheckResult:
    """It cannot work until the remedy is done."""
    return CheckResult(CheckStatus.PROBLEM, evidence, remedy)


def unknown(evidence: str, remedy: str | None = None) -> CheckResult:
    """Not established: the tables or the machine do not say."""
    return CheckResult(CheckStatus.UNKNOWN, evidence, remedy)


def skip(evidence: str) -> CheckResult:
    """Does not apply here."""
    return CheckResult(CheckStatus.SKIPPED, evidence)
