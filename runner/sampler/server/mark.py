"""What a server is known by while it keeps its weights: no version and no digest can be asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.sampler.remote.check import InvalidError
from runner.sampler.server.client import GarbledError, StatusError
from runner.sampler.server.server import Server

DRIFT = 0.1  # nats, mean over the fixed row: what rounding to bfloat16 adds where another kernel computes it


@dataclass(frozen=True, slots=True)
class Mark:
    """started: when its process began, "" where it does not say; scores: of a fixed row, None where it gives none."""

    started: str
    scores: list[float] | None

    def is_other(self, now: Mark) -> bool:
        """Whether the server, or its weights, are other ones now, or may be: it says less, or more, than it did."""
        if self.started != now.started:
            return True
        if self.scores is None or now.scores is None:
            return self.scores is not now.scores
        differences = [abs(a - b) for a, b in zip(self.scores, now.scores, strict=True)]
        return not sum(differences) / len(differences) <= DRIFT


def mark_of(server: Server, row: Sequence[int], model: str) -> Mark:
    """What it is known by now."""
    started = server.started()
    try:
        return Mark(started, server.score(row, model))
    except (InvalidError, StatusError, GarbledError):
        return Mark(started, None)
