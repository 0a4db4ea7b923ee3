"""Automatic choices (kernel, dtype, fallback) and facts: printed, and written to the manifest.

decide(feature, wanted, got, reason)   something else is done than was asked for; refused under strict=true
decide.state(feature, value, reason)   a fact worth knowing, e.g. how many rows were skipped as asked; never refused
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field

from runner.core.errors import EnvironmentProblem

log = logging.getLogger("runner")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was wanted, what was done instead, and why; a fact is what was wanted."""

    feature: str
    wanted: str
    got: str
    reason: str

    @property
    def is_fact(self) -> bool:
        """Whether nothing but what was wanted was done."""
        return self.wanted == self.got

    def __str__(self) -> str:
        instead = "" if self.is_fact else f" instead of {self.wanted}"
        return f"{self.feature}: {self.got}{instead} ({self.reason})"


@dataclass(slots=True)
class Decisions:
    """Callable with (feature, wanted, got, reason); raises EnvironmentProblem when the run is strict."""

    strict: bool = False
    entries: list[Decision] = field(default_factory=list)

    def __call__(self, feature: str, wanted: str, got: str, reason: str) -> None:
        decision = Decision(feature, wanted, got, reason)
        if self.strict and not decision.is_fact:
            raise EnvironmentProblem(f"strict=true does not allow an automatic choice: {decision}")
        if decision not in self.entries:
            self.entries.append(decision)
            log.info("%s %s", "found   " if decision.is_fact else "decided ", decision)

    def record_fact(self, feature: str, value: str, reason: str) -> None:
        """Say a fact, which strict=true allows."""
        self(feature, value, value, reason)

    def records(self) -> dict[str, list[dict[str, str]]]:
        """Plain records for the manifest: `decisions`, and `facts` apart from them."""
        facts = [{"feature": d.feature, "value": d.got, "reason": d.reason} for d in self.entries if d.is_fact]
        return {"decisions": [asdict(d) for d in self.entries if not d.is_fact], "facts": facts}
