"""Sampled answers with their rewards: what one step of policy optimisation learns from, and how it is gathered.

    data ──prompts──▶ sampler ◀──turns──▶ environment ──episodes──▶ reward ──▶ Experience (groups of samples)
      ▲                                                              │
      └─────────────── another round, while groups without contrast are replaced

Legend: G samples per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from runner.algorithm.episodes.episode import Episode, Player
from runner.algorithm.episodes.turns import Turns
from runner.protocols import (
    Completion,
    Environments,
    Prompt,
    Request,
    Reward,
    Rollout,
    Sampler,
    State,
)
from runner.randomness import derive

Parts = Mapping[str, float | None]  # name → score of one part of a reward


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled answer: its tokens, which of them the policy chose (mask), and what it was worth.

    ids, mask, logprobs have one entry per token; a reward of None could not be scored, or nothing scores.
    text: of the last turn; before: what was said until then by the policy and its environment, in a conversation of
    several turns; parts: what a reward that is made of others is made of
    """

    ids: tuple[int, ...]
    mask: tuple[float, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str
    version: int
    reward: float | None
    before: tuple[Mapping[str, Any], ...] = ()
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    samples: tuple[Drawn, ...]

    @property
    def has_contrast(self) -> bool:
        """Whether at least two scored rewards differ."""
        return len({s.reward for s in self.samples if s.reward is not None}) > 1


@dataclass(frozen=True, slots=True)
class Experience:
    """Every group of a step (0-based), and how many rounds of prompts and how many sampled tokens it took."""

    step: int
    groups: tuple[Group, ...]
    rounds: int
    sampled_tokens: int


@runtime_checkable
class Composed(Protocol):
    """A reward made of others, which also says what each of them gave: name of a part → its own score."""

    def composed(
        self, groups: Sequence[Sequence[Completion]]
    ) -> tuple[list[list[float | None]], list[list[Parts]]]: ...


@dataclass(frozen=True, slots=True)
class Collector:
    """Draws and scores the answers to prompts; with environments an answer is an episode of several turns."""

    sampler: Sampler
    reward: Reward | None
    tokenizer: Any
    seed: int
    group_size: int
    environments: Environments | None = None
    turns: Turns | None = None

    def groups(self, prompts: Sequence[Prompt], step: int, round: int) -> list[Group]:
        """G answers to each prompt, scored by a reward if any; seeded by (seed, step, round, prompt, sample, turn)."""
        size = self.group_size

        def write(live: Sequence[tuple[int, Episode]], turn: int) -> list[Rollout]:
            return self.sampler.sample([self._request(e, turn, step, round, at) for at, e in live])

        player = Player(self.tokenizer, self.environments, self.turns)
        episodes = player.play([prompt for prompt in prompts for _ in range(size)], write)
        grouped = [episodes[at * size : (at + 1) * size] for at in range(len(prompts))]
        return [
            Group(prompt, tuple(finished(*one) for one in zip(group, rewards, parts, strict=True)))
            for prompt, group, rewards, parts in zip(prompts, grouped, *self._worth(grouped), strict=True)
        ]

    def _worth(self, grouped: Sequence[Sequence[Episode]]) -> tuple[list[list[float | None]], list[list[Parts]]]:
        """The reward of each sample of each group, and its parts."""
        empty: list[list[Parts]] = [[{} for _ in group] for group in grouped]
        if self.reward is None:
            return [[None] * len(group) for group in grouped], empty
        asked = [[e.completion() for e in group] for group in grouped]
        if isinstance(self.reward, Composed):
            return self.reward.composed(asked)
        return self.reward.score(asked), empty

    def _request(self, episode: Episode, turn: int, step: int, round: int, at: int) -> Request:
        """The next turn's request, of the episode number `at`; only first turns share their prompt."""
        prompt, sample = divmod(at, self.group_size)
        seed = derive(self.seed, "sample", step, round, prompt, sample, turn)
        group = prompt if turn == 0 else at
        return Request((*episode.prompt.ids, *episode.ids), seed, self.sampler.max_new_tokens, group)


def finished(episode: Episode, reward: float | None, parts: Parts) -> Drawn:
    """The finished sample."""
    tokens = (tuple(episode.ids), tuple(episode.mask), tuple(episode.logprobs))
    return Drawn(*tokens, episode.text, episode.finish, episode.version, reward, episode.before, parts)


def rewards(experience: Experience) -> dict[str, float]:
    """What a step's samples say of the reward, under stable names."""
    drawn = [s for group in experience.groups for s in group.samples]
    scored = torch.tensor([s.reward for s in drawn if s.reward is not None], dtype=torch.float64)
    contrast = [group.has_contrast for group in experience.groups]
    return {
        "reward/mean": float(scored.mean()) if len(scored) else float("nan"),
        "reward/std": float(scored.std(correction=0)) if len(scored) else float("nan"),
        "reward/unscored": float(len(drawn) - len(scored)),
        "reward/zero_variance": 1.0 - sum(contrast) / len(contrast),
        **{f"reward/{name}": _mean([s.parts[name] for s in drawn]) for name in drawn[0].parts},
    }


def _mean(scores: Sequence[float | None]) -> float:
    """Of those that there are; NaN without any."""
    known = [score for score in scores if score is not None]
    return math.fsum(known) / len(known) if known else math.nan


def numbers(experience: Experience) -> dict[str, float]:
    """What a step's samples say of the policy, under stable names."""
    drawn = [s for group in experience.groups for s in group.samples]
    lengths = torch.tensor([sum(s.mask) for s in drawn], dtype=torch.float64)
    return {
        "rollout/length": float(lengths.mean()),
        "rollout/cut_off": sum(s.finish == "length" for s in drawn) / len(drawn),
        "rollout/tokens": float(experience.sampled_tokens),
        "rollout/rounds": float(experience.rounds),
        "rollout/staleness": float(experience.step - min(s.version for s in drawn)),
    }


def samples(experience: Experience, rewarded: bool) -> Iterator[Mapping[str, Any]]:
    """Every sample as a line for samples.jsonl, the first of each group first."""
    for turn in range(max(len(group.samples) for group in experience.groups)):
        for group in experience.groups:
            if turn < len(group.samples):
                one = group.samples[turn]
                yield {
                    "prompt": group.prompt.text,
                    **({"turns": list(one.before)} if one.before else {}),
                    "answer": one.text,
                    **({"reward": one.reward} if rewarded else {}),
                    "finish": one.finish,
                    "version": one.version,
                }


def encode(experience: Experience) -> State:
    """The experience as a checkpoint keeps it: numbers of tokens in tensors, the rest as JSON."""
    drawn = [s for group in experience.groups for s in group.samples]
    flat = {name: [x for s in drawn for x in getattr(s, name)] for name in ("ids", "mask", "logprobs")}
    groups = [
        {
            "prompt": {
                "ids": list(g.prompt.ids),
                "text": g.prompt.text,
                "messages": None if g.prompt.messages is None else [dict(m) for m in g.prompt.messages],
                "columns": dict(g.prompt.columns),
            },
            "samples": [
                [len(s.ids), s.text, s.finish, s.version, s.reward, [dict(m) for m in s.before], dict(s.parts)]
                for s in g.samples
            ],
        }
        for g in experience.groups
    ]
    tensors = {n: torch.tensor(v, dtype=torch.int64 if n == "ids" else torch.float64) for n, v in flat.items()}
    return {
        "step": experience.step,
        "groups": groups,
        "rounds": experience.rounds,
        "sampled_tokens": experience.sampled_tokens,
        "tensors": tensors,
    }


def decode(state: State) -> Experience:
    """The inverse of `encode`."""
    rest = {name: iter(tensor.tolist()) for name, tensor in state["tensors"].items()}

    def sample(size: int, text: str, finish: str, version: int, reward: Any, before: Any, parts: Parts) -> Drawn:
        ids, mask, logprobs = (tuple(next(rest[n]) for _ in range(size)) for n in ("ids", "mask", "logprobs"))
        return Drawn(ids, mask, logprobs, text, finish, version, reward, tuple(before), parts)

    groups = []
    for group in state["groups"]:
        one = group["prompt"]
        messages = None if one["messages"] is None else tuple(one["messages"])
        prompt = Prompt(tuple(one["ids"]), one["text"], messages, one["columns"])
        groups.append(Group(prompt, tuple(sample(*s) for s in group["samples"])))
    return Experience(state["step"], tuple(groups), state["rounds"], state["sampled_tokens"])
