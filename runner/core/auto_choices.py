"""Automatic choices (kernel, dtype, fallback) and facts: printed, and written to the manifest.

decide(feature, wanted, got, reason)         something other than the request is done; an error under strict=true
decide.record_fact(feature, value, reason)   a fact, e.g. how many rows were skipped as requested; never an error
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field

from runner.core.errors import EnvironmentProblem

log = logging.getLogger("runner")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was requested, what was done, and why; for a fact both are equal."""

    feature: str
    wanted: str
    got: str
    reason: str

    @property
    def is_fact(self) -> bool:
        """Whether it is a fact: what was done is what was requested."""
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
        """Record a fact, which strict=true allows."""
        self(feature, value, value, reason)

    def records(self) -> dict[str, list[dict[str, str]]]:
        """Plain records for the manifest: `decisions` and `facts`."""
        facts = [{"feature": d.feature, "value": d.got, "reason": d.reason} for d in self.entries if d.is_fact]
        return {"decisions": [asdict(d) for d in self.entries if not d.is_fact], "facts": facts}
