"""Sampling and rewards, partitioned over ranks; all ranks get all results.

    requests, groups, turns ──balanced──▶ those of this rank ──▶ wrapped component ──gathered──▶ all, on every rank

A sample depends only on its request's seed, and a score only on its group: not on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self, TypeVar

from torch import Tensor

from runner.core.completion_text import completion_text
from runner.distributed.work_partition import balance_by_cost, group_by_prompt, run_on_rank0, run_partitioned
from runner.interfaces import (
    Completion,
    RankCollectives,
    Request,
    Rollout,
    Sampler,
    SamplerWrapper,
)
from runner.interfaces.rewards import refuse_wrong_scores
from runner.interfaces.sampling import RequestSource, sample_from, sample_in_waves

FullParamsContext = Callable[[], AbstractContextManager[Any]]  # a block with full weights, which all ranks enter
T = TypeVar("T")
Scores = list[list[float | None]]
Parts = list[list[Mapping[str, float | None]]]


class PartitionedSampler(SamplerWrapper):
    """A sampler on each rank; requests of a group, which share a prompt, are sampled on one rank."""

    def __init__(self, sampler: Sampler, peers: RankCollectives, whole: FullParamsContext, tokenizer: Any) -> None:
        super().__init__(sampler)
        self._peers, self._whole, self._tokenizer = peers, whole, tokenizer

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """See `Sampler`; all ranks ask for the same."""
        members, costs = group_by_prompt(requests)

        def work(mine: list[int]) -> list[list[Rollout]]:
            found = self._sampler.sample([requests[at] for group in mine for at in members[group]])
            drawn = (replace(one, text=completion_text(self._tokenizer, one.ids)) for one in found)
            return [[next(drawn) for _ in members[group]] for group in mine]

        with self._whole():
            found = run_partitioned(self._peers, balance_by_cost(costs, self._peers.size), work)
        placed: dict[int, Rollout] = {}
        for group, drawn in zip(members, found, strict=True):
            placed |= zip(group, drawn, strict=True)
        return [placed[at] for at in range(len(requests))]

    def sample_continuously(self, source: RequestSource) -> None:
        """See `ContinuousSampler`; several ranks sample in waves."""
        if self._peers.size > 1:
            sample_in_waves(self.sample, source)
        else:
            with self._whole():
                sample_from(self._sampler, source)


class Rank0Sampler:
    """A sampler that only rank 0 calls; it broadcasts the results."""

    def __init__(self, make: Callable[[], Sampler], peers: RankCollectives) -> None:
        self._peers = peers
        self._sampler = make() if peers.rank == 0 else None
        self._known: tuple[float, int, int | None] | None = None

    @property
    def temperature(self) -> float:
        """See `Sampler`."""
        return self._limits()[0]

    @property
    def max_new_tokens(self) -> int:
        """See `Sampler`."""
        return self._limits()[1]

    @property
    def max_model_len(self) -> int | None:
        """See `Sampler`."""
        return self._limits()[2]

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """See `Sampler`; all ranks pass the same."""
        self._run_on_rank0(lambda sampler: sampler.load_weights(tensors, version))

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """See `Sampler`; all ranks ask for the same."""
        return self._run_on_rank0(lambda sampler: sampler.sample(requests))

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """See `Sampler`; all ranks ask for the same."""
        return self._run_on_rank0(lambda sampler: sampler.score(rows))

    def pop_metrics(self) -> dict[str, float]:
        """See `Sampler`; only rank 0 has metrics."""
        return {} if self._sampler is None else self._sampler.pop_metrics()

    def release_memory(self) -> None:
        """See `Sampler`."""
        self._run_on_rank0(lambda sampler: sampler.release_memory())

    def close(self) -> None:
        """See `Sampler`; not collective."""
        if self._sampler is not None:
            self._sampler.close()

    def _limits(self) -> tuple[float, int, int | None]:
        """Sampling limits of rank 0's sampler. Collective at the first call."""
        if self._known is None:
            self._known = self._run_on_rank0(
                lambda sampler: (sampler.temperature, sampler.max_new_tokens, sampler.max_model_len)
            )
        return self._known

    def _run_on_rank0(self, what: Callable[[Sampler], T]) -> T:
        def work() -> T:
            assert self._sampler is not None  # only called on rank 0
            return what(self._sampler)

        return run_on_rank0(self._peers, work)


class PartitionedReward:
    """A reward whose groups are scored by different ranks; failures in a row are counted per rank.

    name: of the reward and where it is from, for messages
    """

    def __init__(self, reward: Any, peers: RankCollectives, name: str) -> None:
        self._reward, self._peers, self._name = reward, peers, name

    def score(self, groups: Sequence[Sequence[Completion]]) -> Scores:
        """See `Reward`; all ranks pass the same."""
        return self.score_components(groups)[0]

    def score_components(self, groups: Sequence[Sequence[Completion]]) -> tuple[Scores, Parts]:
        """The scores, and those of each component, if the reward has any; all ranks pass the same."""

        def work(mine: Sequence[int]) -> list[tuple[Any, Any]]:
            chosen = [groups[i] for i in mine]
            if hasattr(self._reward, "score_components"):
                scores, parts = self._reward.score_components(chosen)
            else:
                scores, parts = self._reward.score(chosen), [[{} for _ in group] for group in chosen]
            refuse_wrong_scores(self._name, scores, chosen)
            return list(zip(scores, parts, strict=True))

        costs = [sum(len(one.ids) for one in group) for group in groups]
        found = run_partitioned(self._peers, balance_by_cost(costs, self._peers.size), work)
        return [scores for scores, _ in found], [parts for _, parts in found]

    def with_peers(self, peers: RankCollectives) -> Self:
        """The same reward for another thread with its own collectives."""
        return type(self)(self._reward, peers, self._name)

    def close(self) -> None:
        """See `Reward`."""
        self._reward.close()
