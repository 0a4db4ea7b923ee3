"""No sink beside metrics.jsonl and the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.tracker.config import NoTrackerConfig


class NoTracker:
    """Takes everything and keeps nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def finish(self, status: str) -> list[str]:
        """Nothing to say."""
        return []


def build(config: NoTrackerConfig, **context: Any) -> NoTracker:
    """A sink that needs none of the run's context."""
    return NoTracker()
