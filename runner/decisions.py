"""Every automatic decision (kernel, dtype, fallback) in one list: said, kept for the manifest, refused under strict."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field

from runner.errors import EnvironmentProblem

log = logging.getLogger("runner")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was wanted, what was done instead, and why."""

    feature: str
    wanted: str
    got: str
    reason: str

    def __str__(self) -> str:
        instead = f" instead of {self.wanted}" if self.wanted != self.got else ""
        return f"{self.feature}: {self.got}{instead} ({self.reason})"


@dataclass(slots=True)
class Decisions:
    """Callable with (feature, wanted, got, reason); raises EnvironmentProblem when the run is strict."""

    strict: bool = False
    made: list[Decision] = field(default_factory=list)

    def __call__(self, feature: str, wanted: str, got: str, reason: str) -> None:
        decision = Decision(feature, wanted, got, reason)
        if self.strict and wanted != got:
            raise EnvironmentProblem(f"strict=true refuses an automatic decision: {decision}")
        if decision not in self.made:
            self.made.append(decision)
            log.info("decided  %s", decision)

    def records(self) -> list[dict[str, str]]:
        """Plain records for the manifest."""
        return [asdict(d) for d in self.made]
