"""The line to Ray's driver for a sweep, a process of its own (runner.sweep.ray.driver)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from runner.ray import link

ANSWER_S = 60.0


class Link(link.Link):
    """Ray's driver, from start to end. `gone`: jobs without an actor any more, and why."""

    def __init__(self, asked: Mapping[str, Any], grace_s: float = 0.0) -> None:
        super().__init__("runner.sweep.ray.driver", {**asked, "grace_s": grace_s}, grace_s)
        self.gone: dict[str, str] = {}
        self._found: set[str] = set()

    def hear_of(self, tokens: Set[str]) -> None:
        """Wait until each of these jobs is known to be found or gone. Raises EnvironmentProblem."""
        self.wait_for(lambda: tokens <= self._found | self.gone.keys(), ANSWER_S)

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["is"] == "found":
            self._found.add(event["token"])
        else:
            self.gone[event["token"]] = event["why"]
