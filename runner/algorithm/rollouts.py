"""Sampled answers with their rewards: collection of what one step of policy optimization trains on.

    data ──prompts──▶ sampler ◀──turns──▶ environment ──episodes──▶ reward ──▶ Experience (groups of samples)
      ▲                                                              │
      └─────────────── another round, while groups without contrast are replaced

Legend: G samples per prompt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from runner.algorithm.episode import FAILED, AnswerSampler, Episode, EpisodeRunner
from runner.algorithm.program_episodes import run_programs
from runner.core.batch import Batch
from runner.core.prefix_tree import SHARED
from runner.core.rng import derive_seed
from runner.interfaces import (
    Completion,
    Environments,
    ExtendConversation,
    Prompt,
    Request,
    Reward,
)
from runner.interfaces.environments import ProgramEnvironments
from runner.interfaces.media import sample_images

if TYPE_CHECKING:
    from runner.interfaces.sampling import Experts

T = TypeVar("T")
RewardComponents = Mapping[str, float | None]  # name → score of one part of a reward


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One sampled answer: its tokens, which of them the policy chose (mask), and what it was worth.

    ids, mask, logprobs have one entry per token; a reward of None could not be scored, or nothing scores.
    logprobs, truncation, counts: see `Episode`; finish: stop, length, or failed, by its environment, which leaves it
    out; text: of the last turn; history: the earlier turns of the policy and its environment; components: the scores of
    the parts of a composite reward; version, versions: of the policy's own tokens, see `Rollout`; experts: int16, of
    the prompt and all tokens but the last, see `Rollout`; extra_rows: further rows of the same episode
    """

    ids: Sequence[int]
    mask: Sequence[float]
    logprobs: Sequence[float]
    text: str
    finish: str
    version: int
    reward: float | None
    history: tuple[Mapping[str, Any], ...] = ()
    components: RewardComponents = field(default_factory=dict)
    truncation: float = 0.0
    versions: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    experts: Experts | None = field(default=None, compare=False)
    extra_rows: tuple[RolloutSample, ...] = ()

    @property
    def rows(self) -> tuple[RolloutSample, ...]:
        """All rows of the episode, in the order of their last turns."""
        return (*self.extra_rows, self)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    samples: tuple[RolloutSample, ...]

    @property
    def played_samples(self) -> tuple[RolloutSample, ...]:
        """Those that are trained on: not of an episode that failed, or had no room for a turn."""
        return tuple(sample for sample in self.samples if sample.ids and sample.finish != FAILED)

    @property
    def has_reward_variance(self) -> bool:
        """Whether at least two scored rewards differ."""
        return len({one.reward for one in self.played_samples if one.reward is not None}) > 1

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What came of each sample."""
        return tuple(
            Outcome(s.reward, dict(s.components), sum(int(np.sum(row.mask)) for row in s.rows), s.finish, s.counts)
            for s in self.samples
        )


class Outcome(NamedTuple):
    """What the metrics of a step need of one sample; length: number of the policy's own tokens."""

    reward: float | None
    components: RewardComponents
    length: int
    finish: str
    counts: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Experience:
    """The groups of a step (0-based), statistics of the groups beside them, and the number of rounds."""

    step: int
    groups: tuple[Group, ...]
    rounds: int
    filtered_out: tuple[tuple[Outcome, ...], ...] = ()

    @property
    def all_outcomes(self) -> list[tuple[Outcome, ...]]:
        """The outcomes of every sampled group: metrics of the chosen groups alone would be biased."""
        return [*(group.outcomes for group in self.groups), *self.filtered_out]


def has_reward_variance(group: Sequence[Outcome]) -> bool:
    """Whether at least two scored rewards differ."""
    return len({one.reward for one in group if one.reward is not None}) > 1


def make_experience(step: int, drawn: Sequence[Group], size: int, rounds: int, *, contrast: bool) -> Experience:
    """The first `size` groups; with `contrast`, of those with different rewards, if there are any."""
    chosen = [at for at, group in enumerate(drawn) if group.has_reward_variance or not contrast] or range(len(drawn))
    kept = set(chosen[:size])
    left_out = tuple(group.outcomes for at, group in enumerate(drawn) if at not in kept)
    return Experience(step, tuple(drawn[at] for at in sorted(kept)), rounds, left_out)


@runtime_checkable
class CompositeReward(Protocol):
    """A reward made of others, which also returns the score of each part by its name."""

    def score_components(
        self, groups: Sequence[Sequence[Completion]]
    ) -> tuple[list[list[float | None]], list[list[RewardComponents]]]: ...


@dataclass(frozen=True, slots=True)
class RolloutCollector:
    """Draws and scores the answers to prompts; with environments an answer is an episode of several turns."""

    sampler: AnswerSampler
    reward: Reward | None
    tokenizer: Any
    seed: int
    group_size: int
    environments: Environments | None = None
    extend: ExtendConversation | None = None

    def collect_groups(
        self, prompts: Sequence[Prompt], step: int, round: int, finished: int | None = None
    ) -> list[Group]:
        """G scored answers to each prompt; seeds: (seed, step, round, prompt, sample, turn).

        finished: the steps before an evaluation, whose `step` is always 0
        """
        before = step if finished is None else finished
        size = self.group_size

        player = EpisodeRunner(self.tokenizer, self.environments, self.extend, self.sampler.max_model_len)

        def request(first: int, at: int, episode: Episode, turn: int) -> Request:
            """The next turn's request, of the episode number `first` + `at`; only first turns share their prompt."""
            prompt, sample = divmod(at := first + at, size)
            seed = derive_seed(self.seed, "sample", step, round, prompt, sample, turn)
            limit = player.turn_token_limit(episode, self.sampler.max_new_tokens)
            return Request((*episode.prompt.ids, *episode.ids), seed, limit, at if turn else prompt, raw=True)

        seeds = [
            derive_seed(self.seed, "environment", step, round, at) for at in range(len(prompts)) for _ in range(size)
        ]
        repeated = [prompt for prompt in prompts for _ in range(size)]
        if self.environments is not None and self.environments.runs_programs:
            programs = cast(ProgramEnvironments, self.environments)
            streams = [(self.seed, "sample", step, round, *divmod(at, size)) for at in range(len(repeated))]
            episodes = run_programs(programs, repeated, seeds, self.sampler, streams, self.tokenizer)
        else:
            most = self.environments and self.environments.max_episodes
            count = size * max(1, (most or len(repeated)) // size)  # of whole groups; the others wait for their end
            parts = [(first, slice(first, first + count)) for first in range(0, len(repeated), count)]
            runs = (
                player.run_episodes(repeated[part], seeds[part], partial(request, first), self.sampler)
                for first, part in parts
            )
            episodes = [episode for run in runs for episode in run]
        grouped = [episodes[at * size : (at + 1) * size] for at in range(len(prompts))]
        return [make_group(*one) for one in zip(grouped, *self._score_groups(grouped, before), strict=True)]

    def _score_groups(
        self, grouped: Sequence[Sequence[Episode]], step: int
    ) -> tuple[list[list[float | None]], list[list[RewardComponents]]]:
        """The reward of each sample of each group, and its parts."""
        empty: list[list[RewardComponents]] = [[{} for _ in group] for group in grouped]
        if self.reward is None:
            return [[None] * len(group) for group in grouped], empty
        asked = [[e.completion(step) for e in group if e.finish != FAILED] for group in grouped]
        scores, parts = (
            self.reward.score_components(asked)
            if isinstance(self.reward, CompositeReward)
            else (self.reward.score(asked), [[{}] * len(group) for group in asked])
        )
        return (
            [_with_gaps(group, found, None) for group, found in zip(grouped, scores, strict=True)],
            [_with_gaps(group, found, {}) for group, found in zip(grouped, parts, strict=True)],
        )


def _with_gaps(group: Sequence[Episode], found: Sequence[T], gap: T) -> list[T]:
    """What was found of a group's episodes that did not fail, and `gap` for the others."""
    rest = iter(found)
    return [gap if episode.finish == FAILED else next(rest) for episode in group]


def make_group(
    episodes: Sequence[Episode], rewards: Sequence[float | None], parts: Sequence[RewardComponents]
) -> Group:
    """The samples of one prompt: the beginning that the episodes share; the rest of theirs is context."""
    prompts = [row.prompt for one in episodes for row in (one, *one.extra_rows) if row.ids] or [episodes[0].prompt]
    if all(one is prompts[0] for one in prompts):
        shared = len(prompts[0].ids)
    else:
        shared = sum(1 for _ in takewhile(lambda ids: len({*ids}) == 1, zip(*(p.ids for p in prompts), strict=False)))
    prompt = prompts[0] if shared == len(prompts[0].ids) else replace(prompts[0], ids=prompts[0].ids[:shared])
    return Group(prompt, tuple(to_sample(*one, shared) for one in zip(episodes, rewards, parts, strict=True)))


def to_sample(episode: Episode, reward: float | None, parts: RewardComponents, shared: int) -> RolloutSample:
    """The finished sample; the ids of its prompt after the first `shared` are context of its own."""
    own = array("q", episode.prompt.ids[shared:] if episode.ids else ())
    zeros = array("d", [0.0]) * len(own)
    tokens = own + episode.ids, zeros + episode.mask, zeros + episode.logprobs
    turn = (episode.text, episode.finish, episode.version)
    return RolloutSample(
        *tokens,
        *turn,
        reward,
        episode.history,
        parts,
        episode.truncation,
        tuple(episode.versions),
        dict(episode.counts),
        episode.experts,
        tuple(to_sample(row, reward, {}, shared) for row in episode.extra_rows),
    )


def expert_channel(batch: Batch, groups: Sequence[Group]) -> Tensor | None:
    """The experts that the sampler used for each token, int16 [T, M, k]; None where it returned none.

    -1 where they are not known: from an episode's last own token on, which was drawn and not computed, and in samples
    without experts. batch: made of the groups by `pack_trees`; a shared prompt has those of the first sample.
    """
    rows = [[row for one in group.played_samples for row in one.rows] for group in groups]
    known = next((row.experts for group in rows for row in group if row.experts is not None), None)
    if known is None:
        return None
    parts = []
    for tree, branch, length in zip(*(batch.rows[n].tolist() for n in ("tree", "branch", "lengths")), strict=True):
        sample = rows[tree][max(branch, 0)]
        used = known[:0] if sample.experts is None else sample.experts
        whole = np.full((len(groups[tree].prompt.ids) + len(sample.ids), *known.shape[1:]), -1, np.int16)
        whole[: len(used)] = used
        parts.append(whole[:length] if branch == SHARED else whole[-length:])  # a branch without its prompt, or with it
    return torch.from_numpy(np.concatenate(parts))


def reward_metrics(experience: Experience) -> dict[str, float]:
    """Reward metrics over all samples of a step; metrics without a scored sample are left out."""
    drawn = [one for group in experience.all_outcomes for one in group if one.finish != FAILED]
    scored = torch.tensor([one.reward for one in drawn if one.reward is not None], dtype=torch.float64)
    differ = [
        has_reward_variance(g)
        for g in experience.all_outcomes
        if len(g) > 1 and any(one.reward is not None for one in g)
    ]
    names = dict.fromkeys(name for one in drawn for name in one.components)
    known = {name: [s for one in drawn if (s := one.components[name]) is not None] for name in names}
    return {
        **({"reward/mean": float(scored.mean()), "reward/std": float(scored.std(correction=0))} if len(scored) else {}),
        "reward/num_failed": float(len(drawn) - len(scored)),
        **({"reward/zero_variance": 1.0 - sum(differ) / len(differ)} if differ else {}),
        **{f"reward/{name}": math.fsum(scores) / len(scores) for name, scores in known.items() if scores},
    }


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """Metrics of all samples of a step, under stable names."""
    drawn = [one for group in experience.all_outcomes for one in group]
    tokens = sum(one.length for one in drawn)
    samples = [row for group in experience.groups for sample in group.samples for row in sample.rows]
    oldest = min((sample.version for sample in samples if sample.ids), default=experience.step)
    truncation = math.fsum(sample.truncation for sample in samples)
    ages = [experience.step - version for sample in samples for version in sample.versions]
    return {
        "rollout/length": tokens / len(drawn),
        "rollout/truncated_frac": sum(one.finish == "length" for one in drawn) / len(drawn),
        "rollout/tokens": float(tokens),
        "rollout/resample_rounds": float(experience.rounds),
        "rollout/staleness": float(experience.step - oldest),
        **({"rollout/staleness_mean": sum(ages) / len(ages)} if ages else {}),  # of a sampler that switches weights
        # of a sampler that truncates and reports both distributions; else it is 0, or NaN
        **({"rollout/truncation_kl": truncation / sum(sum(s.mask) for s in samples)} if truncation > 0 else {}),
        **_environment_metrics(drawn),
    }


def _environment_metrics(drawn: Sequence[Outcome]) -> dict[str, float]:
    """Episodes that are left out, and the mean counts of an episode, of an environment that counts."""
    names = dict.fromkeys(name for one in drawn for name in one.counts)
    failed = sum(one.finish == FAILED for one in drawn)
    means = {f"environment/{name}": sum(one.counts.get(name, 0) for one in drawn) / len(drawn) for name in names}
    return {"environment/num_failed": float(failed), **means} if failed or means else {}


def sample_records(experience: Experience, rewarded: bool, tokenizer: Any) -> Iterator[Mapping[str, Any]]:
    """Every sample as a line for samples.jsonl, the first of each group first."""
    for turn in range(max(len(group.samples) for group in experience.groups)):
        for group in experience.groups:
            if turn < len(group.samples):
                one = group.samples[turn]
                yield {
                    "prompt": group.prompt.text,
                    **sample_images(tokenizer, group.prompt.ids),
                    **({"turns": list(one.history)} if one.history else {}),
                    "answer": one.text,
                    **({"reward": one.reward} if rewarded else {}),
                    "finish": one.finish,
                    "version": one.version,
                    **({"versions": runs} if len(runs := version_runs(one.versions)) > 1 else {}),
                }


def version_runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Each version with the number of tokens that it drew, in their order."""
    return [(version, len(list(tokens))) for version, tokens in groupby(versions)]
