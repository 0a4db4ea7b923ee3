"""A weighted sum of rewards; None where one of them has no score, because a sum without it would be another reward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from runner.protocols import Completion, Reward
from runner.randomness import derive
from runner.registry import resolve
from runner.reward.config import SumConfig
from runner.reward.parts import members, with_own_keys


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ weight · score over the parts, each a (weight, reward)."""

    parts: Sequence[tuple[float, Reward]]

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]:
        """One list per group; None where any part has None."""
        weights = [weight for weight, _ in self.parts]
        scores = [reward.score(groups) for _, reward in self.parts]
        return [[_total(weights, sample) for sample in zip(*group, strict=True)] for group in zip(*scores, strict=True)]

    def close(self) -> None:
        """Close every part, also where one of them fails to."""
        with ExitStack() as stack:
            for _, reward in self.parts:
                stack.callback(reward.close)


def build(config: SumConfig, *, seed: int, **common: Any) -> Sum:
    """The sum; each part has a random stream of its own. Closes those already built if one cannot be."""
    built: list[tuple[float, Reward]] = []
    try:
        for i, part in enumerate(members(config.parts)):
            factory = resolve(type(part.config).factory)
            with with_own_keys(i):
                built.append((part.weight, factory(part.config, seed=derive(seed, "part", i), **common)))
    except BaseException:
        Sum(built).close()
        raise
    return Sum(tuple(built))


def _total(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    known = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
    return sum(known) if len(known) == len(scores) else None
