"""A weighted sum of rewards; None where a component has no score: the sum would be another reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from runner.core.errors import RunnerError
from runner.core.rng import derive_seed
from runner.interfaces import Completion, Reward
from runner.interfaces.rewards import GroupScores, ScoringFailures, refuse_wrong_scores, unscored_group
from runner.reward.base import collect_errors, prefix_error_keys, raise_collected, require_components
from runner.reward.config import FallibleConfig, SumConfig
from runner.spec.registry import component_source, resolve

Scores = list[float | None]
ComponentScores = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class WeightedSumReward:
    """Σ weight · score over (weight, reward) components; `names` are their names, in order.

    sources: where each is from, for messages; failures: counts groups without a single sum, such as where parts fail on
    different samples
    """

    parts: Sequence[tuple[float, Reward]]
    names: Sequence[str]
    sources: Sequence[str]
    failures: ScoringFailures

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]:
        """One list per group; None where any part has None. Raises as `ScoringFailures` does."""
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
        sums = [[_weighted_sum(weights, one) for one in group] for group in each]
        return [self._record_group(*one) for one in zip(sums, parts, strict=True)], parts

    def _record_group(self, sums: Scores, parts: Sequence[ComponentScores]) -> Scores:
        """Count a group; only one without any sum is a failure of the sum."""
        missing = Counter(name for one in parts for name, score in one.items() if score is None)
        if not sums or any(value is not None for value in sums):
            return self.failures.record_group(GroupScores(sums))
        counts = ", ".join(f"{name} for {count}" for name, count in missing.items())
        text = f"every sample of a group of {len(sums)} lacks the score of a part: {counts}"
        return self.failures.record_group(unscored_group(len(sums), "no sum in a whole group", text))

    def _scores(self, groups: Sequence[Sequence[Completion]]) -> list[list[Scores]]:
        """The scores of each part. Raises one error with those of all parts."""
        found, errors = list[list[Scores]](), list[RunnerError]()
        for (_, reward), source in zip(self.parts, self.sources, strict=True):
            with collect_errors(errors):
                found.append(reward.score(groups))
                refuse_wrong_scores(source, found[-1], groups)
        raise_collected(errors)
        return found

    def close(self) -> None:
        """Close every part, also where one of them fails to."""
        with ExitStack() as stack:
            stack.callback(self.failures.close)
            for _, reward in self.parts:
                stack.callback(reward.close)


def build(config: SumConfig, *, seed: int, **common: Any) -> WeightedSumReward:
    """The sum; each part has a random stream of its own. Closes those that were built if one cannot be."""
    built, errors = list[tuple[float, Reward]](), list[RunnerError]()
    parts = require_components(config.parts)
    most = [part.config.max_failures for part in parts if isinstance(part.config, FallibleConfig)]
    limit = max(most, default=FallibleConfig.model_fields["max_failures"].default)
    failures = ScoringFailures("reward=sum", limit, "fix the parts; run.log has the first reason of each")
    try:
        for i, part in enumerate(parts):
            factory = resolve(type(part.config).factory)
            with collect_errors(errors), prefix_error_keys(i):
                built.append((part.weight, factory(part.config, seed=derive_seed(seed, "part", i), **common)))
        raise_collected(errors)
    except BaseException:
        WeightedSumReward(built, (), (), failures).close()
        raise
    sources = [component_source(part.config) for part in parts]
    return WeightedSumReward(tuple(built), config.component_metrics(), sources, failures)


def _weighted_sum(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    known = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
    return sum(known) if len(known) == len(scores) else None
