"""A weighted sum of rewards; None where a component has no score: the sum would be another reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from runner.core.errors import RunnerError
from runner.core.rng import derive_seed
from runner.interfaces import Completion, Reward
from runner.reward.base import collect_errors, prefix_error_keys, raise_collected, require_components
from runner.reward.config import SumConfig
from runner.spec.registry import resolve

Scores = list[float | None]
ComponentScores = Mapping[str, float | None]
RESERVED_NAMES = ("mean", "std", "num_failed", "zero_variance")  # reward/… of the sum itself


@dataclass(frozen=True, slots=True)
class WeightedSumReward:
    """Σ weight · score over (weight, reward) components; `names` are their names, in order."""

    parts: Sequence[tuple[float, Reward]]
    names: Sequence[str]

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]:
        """One list per group; None where any part has None."""
        return self.score_components(groups)[0]

    def score_components(
        self, groups: Sequence[Sequence[Completion]]
    ) -> tuple[list[Scores], list[list[ComponentScores]]]:
        """The sums, one list per group, and the score of each part by its name, before its weight."""
        weights = [weight for weight, _ in self.parts]
        each = [list(zip(*group, strict=True)) for group in zip(*self._scores(groups), strict=True)]
        parts: list[list[ComponentScores]] = [
            [dict(zip(self.names, one, strict=True)) for one in group] for group in each
        ]
        return [[_weighted_sum(weights, one) for one in group] for group in each], parts

    def _scores(self, groups: Sequence[Sequence[Completion]]) -> list[list[Scores]]:
        """The scores of each part. Raises one error with those of all parts."""
        found, errors = list[list[Scores]](), list[RunnerError]()
        for _, reward in self.parts:
            with collect_errors(errors):
                found.append(reward.score(groups))
        raise_collected(errors)
        return found

    def close(self) -> None:
        """Close every part, also where one of them fails to."""
        with ExitStack() as stack:
            for _, reward in self.parts:
                stack.callback(reward.close)


def build(config: SumConfig, *, seed: int, **common: Any) -> WeightedSumReward:
    """The sum; each part has a random stream of its own. Closes those that were built if one cannot be."""
    built, errors = list[tuple[float, Reward]](), list[RunnerError]()
    parts = require_components(config.parts)
    try:
        for i, part in enumerate(parts):
            factory = resolve(type(part.config).factory)
            with collect_errors(errors), prefix_error_keys(i):
                built.append((part.weight, factory(part.config, seed=derive_seed(seed, "part", i), **common)))
        raise_collected(errors)
    except BaseException:
        WeightedSumReward(built, ()).close()
        raise
    return WeightedSumReward(tuple(built), component_names([part.config.component_name() for part in parts]))


def component_names(components: Sequence[str]) -> list[str]:
    """The metric name of each component: its reward's name, with its index where names repeat."""
    clear = [components.count(name) == 1 and name not in RESERVED_NAMES for name in components]
    return [name if c else f"{name}[{i}]" for i, (name, c) in enumerate(zip(components, clear, strict=True))]


def _weighted_sum(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    known = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
    return sum(known) if len(known) == len(scores) else None
