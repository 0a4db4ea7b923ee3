"""A weighted sum of rewards; None where one of them has no score, because a sum without it would be another reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from runner.core.rng import derive
from runner.interfaces import Completion, Reward
from runner.reward.base import members, with_own_keys
from runner.reward.config import SumConfig
from runner.spec.registry import resolve

Scores = list[float | None]
Parts = Mapping[str, float | None]
TAKEN = ("mean", "std", "unscored", "zero_variance")  # reward/… of the sum itself


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ weight · score over the parts, each a (weight, reward); `names` is what they are called, in their order."""

    parts: Sequence[tuple[float, Reward]]
    names: Sequence[str]

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]:
        """One list per group; None where any part has None."""
        return self.composed(groups)[0]

    def composed(self, groups: Sequence[Sequence[Completion]]) -> tuple[list[Scores], list[list[Parts]]]:
        """The sums, one list per group, and the score of each part by its name, before its weight."""
        weights = [weight for weight, _ in self.parts]
        each = [list(zip(*group, strict=True)) for group in zip(*self._scores(groups), strict=True)]
        parts: list[list[Parts]] = [[dict(zip(self.names, one, strict=True)) for one in group] for group in each]
        return [[_total(weights, one) for one in group] for group in each], parts

    def _scores(self, groups: Sequence[Sequence[Completion]]) -> list[list[Scores]]:
        return [reward.score(groups) for _, reward in self.parts]

    def close(self) -> None:
        """Close every part, also where one of them fails to."""
        with ExitStack() as stack:
            for _, reward in self.parts:
                stack.callback(reward.close)


def build(config: SumConfig, *, seed: int, **common: Any) -> Sum:
    """The sum; each part has a random stream of its own. Closes those already built if one cannot be."""
    built: list[tuple[float, Reward]] = []
    parts = members(config.parts)
    try:
        for i, part in enumerate(parts):
            factory = resolve(type(part.config).factory)
            with with_own_keys(i):
                built.append((part.weight, factory(part.config, seed=derive(seed, "part", i), **common)))
    except BaseException:
        Sum(built, ()).close()
        raise
    return Sum(tuple(built), names([part.config.component_name() for part in parts]))


def names(components: Sequence[str]) -> list[str]:
    """What each part is called in metrics: as its component, and with its number where that says too little."""
    clear = [components.count(name) == 1 and name not in TAKEN for name in components]
    return [name if c else f"{name}[{i}]" for i, (name, c) in enumerate(zip(components, clear, strict=True))]


def _total(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    known = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
    return sum(known) if len(known) == len(scores) else None
