"""Sampled answers with their rewards: what one step of policy optimisation learns from, and how it is gathered.

    data ──prompts──▶ sampler ◀──turns──▶ environment ──episodes──▶ reward ──▶ Experience (groups of samples)
      ▲                                                              │
      └─────────────── another round, while groups without contrast are replaced

Legend: G samples per prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runner.algorithm.turns import Turns
from runner.protocols import (
    Completion,
    Environment,
    Environments,
    Observation,
    Prompt,
    Request,
    Reward,
    Rollout,
    Sampler,
    State,
)
from runner.randomness import derive


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled answer: its tokens, which of them the policy chose (mask), and what it was worth.

    ids, mask, logprobs have one entry per token; a reward of None could not be scored.
    """

    ids: tuple[int, ...]
    mask: tuple[float, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str
    version: int
    reward: float | None


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


@dataclass(slots=True)
class Episode:
    """A sample in the making: the policy's turns, and between them what its environment said."""

    prompt: Prompt
    group: int
    environment: Environment | None
    said: list[Mapping[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    version: int = 0

    def hear(self, rollout: Rollout, text: str) -> None:
        """A turn of the policy."""
        self.ids += rollout.ids
        self.mask += [1.0] * len(rollout.ids)
        self.logprobs += rollout.logprobs
        self.said.append({"role": "assistant", "content": text})
        self.text, self.finish, self.version = text, rollout.finish, rollout.version

    def told(self, observation: Observation, ids: Sequence[int]) -> None:
        """What the environment said: context, never learnt."""
        self.ids += ids
        self.mask += [0.0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.said.append({"role": observation.role, "content": observation.text})

    def completion(self) -> Completion:
        """The episode as a reward sees it."""
        own = tuple(i for i, mine in zip(self.ids, self.mask, strict=True) if mine)
        messages = None if self.prompt.messages is None else (*self.prompt.messages, *self.said)
        return Completion(self.prompt, own, self.text, self.finish, messages)

    def drawn(self, reward: float | None) -> Drawn:
        """The finished sample."""
        tokens = (tuple(self.ids), tuple(self.mask), tuple(self.logprobs))
        return Drawn(*tokens, self.text, self.finish, self.version, reward)


@dataclass(frozen=True, slots=True)
class Collector:
    """Draws and scores the answers to prompts; with environments an answer is an episode of several turns."""

    sampler: Sampler
    reward: Reward
    tokenizer: Any
    seed: int
    group_size: int
    environments: Environments | None = None
    turns: Turns | None = None

    def groups(self, prompts: Sequence[Prompt], step: int, round: int) -> list[Group]:
        """G scored answers to each prompt; seeded by (seed, step, round, prompt, sample, turn)."""
        episodes = [self._begin(prompt, at) for at, prompt in enumerate(prompts) for _ in range(self.group_size)]
        live, turn = list(enumerate(episodes)), 0
        while live:
            rollouts = self.sampler.sample([self._request(e, turn, step, round, at) for at, e in live])
            for (_, episode), rollout in zip(live, rollouts, strict=True):
                episode.hear(rollout, self._text(rollout))
            live = [(at, episode) for at, episode in live if self._goes_on(episode, turn)]
            turn += 1
        size = self.group_size
        grouped = [episodes[at * size : (at + 1) * size] for at in range(len(prompts))]
        rewards = self.reward.score([[e.completion() for e in group] for group in grouped])
        return [
            Group(prompt, tuple(e.drawn(r) for e, r in zip(group, scores, strict=True)))
            for prompt, group, scores in zip(prompts, grouped, rewards, strict=True)
        ]

    def _begin(self, prompt: Prompt, at: int) -> Episode:
        environment = None if self.environments is None else self.environments.make()
        if environment is not None:
            environment.reset(prompt)
        return Episode(prompt, at, environment)

    def _request(self, episode: Episode, turn: int, step: int, round: int, at: int) -> Request:
        """The next turn's request; only first turns share their prompt."""
        sample = at % self.group_size
        seed = derive(self.seed, "sample", step, round, episode.group, sample, turn)
        group = episode.group if turn == 0 else at
        return Request((*episode.prompt.ids, *episode.ids), seed, self.sampler.max_new_tokens, group)

    def _goes_on(self, episode: Episode, turn: int) -> bool:
        """Let the environment answer; False at the end of the episode."""
        if episode.environment is None or self.turns is None or self.environments is None:
            return False
        if episode.finish == "length" or turn + 1 == self.environments.max_turns:
            return False
        observation = episode.environment.step(episode.text)
        if observation is None:
            return False
        episode.told(observation, self.turns.observation(observation.role, observation.text, episode.ids))
        return True

    def _text(self, rollout: Rollout) -> str:
        text: str = self.tokenizer.decode(rollout.ids, skip_special_tokens=True)
        return text


def numbers(experience: Experience) -> dict[str, float]:
    """What a step's samples say of the policy and of the reward, under stable names."""
    drawn = [s for group in experience.groups for s in group.samples]
    scored = torch.tensor([s.reward for s in drawn if s.reward is not None], dtype=torch.float64)
    lengths = torch.tensor([sum(s.mask) for s in drawn], dtype=torch.float64)
    contrast = [group.has_contrast for group in experience.groups]
    return {
        "reward/mean": float(scored.mean()) if len(scored) else float("nan"),
        "reward/std": float(scored.std(correction=0)) if len(scored) else float("nan"),
        "reward/unscored": float(len(drawn) - len(scored)),
        "reward/zero_variance": 1.0 - sum(contrast) / len(contrast),
        "rollout/length": float(lengths.mean()),
        "rollout/cut_off": sum(s.finish == "length" for s in drawn) / len(drawn),
        "rollout/tokens": float(experience.sampled_tokens),
        "rollout/rounds": float(experience.rounds),
        "rollout/staleness": float(experience.step - min(s.version for s in drawn)),
    }


def samples(experience: Experience) -> Iterator[Mapping[str, Any]]:
    """Every sample as a line for samples.jsonl, the first of each group first."""
    for turn in range(max(len(group.samples) for group in experience.groups)):
        for group in experience.groups:
            if turn < len(group.samples):
                one = group.samples[turn]
                yield {
                    "prompt": group.prompt.text,
                    "answer": one.text,
                    "reward": one.reward,
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
            "samples": [[len(s.ids), s.text, s.finish, s.version, s.reward] for s in g.samples],
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

    def drawn(size: int, text: str, finish: str, version: int, reward: float | None) -> Drawn:
        ids, mask, logprobs = (tuple(next(rest[n]) for _ in range(size)) for n in ("ids", "mask", "logprobs"))
        return Drawn(ids, mask, logprobs, text, finish, version, reward)

    groups = []
    for group in state["groups"]:
        one = group["prompt"]
        messages = None if one["messages"] is None else tuple(one["messages"])
        prompt = Prompt(tuple(one["ids"]), one["text"], messages, one["columns"])
        groups.append(Group(prompt, tuple(drawn(*s) for s in group["samples"])))
    return Experience(state["step"], tuple(groups), state["rounds"], state["sampled_tokens"])
