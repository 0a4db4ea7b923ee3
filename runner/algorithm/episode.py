r"""Episodes: the turns of a policy and its environment, token by token.

    prompt ──▶ policy ──turn──▶ environment ──text──▶ policy ──turn──▶ … until the environment returns None

The same for sampled answers, which are trained on, and for greedy ones, which are evaluated. `extend` writes an
observation as the chat template does; the policy's own tokens are never written as text and tokenized again:

    … answer<|im_end|> │ \n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n │ next answer …
                       └────────────────── ids of an observation ─────────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.core.completion_text import completion_text
from runner.interfaces import (
    Completion,
    EnvironmentBatch,
    EnvironmentFactory,
    ExtendConversation,
    Observation,
    Prompt,
    Rollout,
)


@dataclass(slots=True)
class Episode:
    """An unfinished sample: the policy's turns, and the environment's text between them.

    text: of the policy's last turn; messages: every turn so far; mask: 1 on the policy's own tokens; logprobs: at the
    sampling temperature, before truncation, NaN where the sampler cannot report them; truncation: Σ (log q − log p)
    over the policy's tokens, q the truncated distribution and p the whole one; version, versions: see `Rollout`, of all
    turns, version the oldest
    """

    prompt: Prompt
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    truncation: float = 0.0
    text: str = ""
    finish: str = ""
    version: int = 0
    versions: list[int] = field(default_factory=list)

    def append_action(self, rollout: Rollout, text: str) -> None:
        """A turn of the policy."""
        self.ids += rollout.ids
        self.mask += [1.0] * len(rollout.ids)
        raw = rollout.raw_logprobs or (math.nan,) * len(rollout.ids)
        self.logprobs += raw
        self.truncation += math.fsum(q - p for q, p in zip(rollout.logprobs, raw, strict=True))
        self.messages.append({"role": "assistant", "content": text})
        self.text, self.finish = text, rollout.finish
        self.version = rollout.version if len(self.messages) == 1 else min(self.version, rollout.version)
        self.versions += rollout.versions

    def append_observation(self, observation: Observation, ids: Sequence[int]) -> None:
        """Text of the environment: context, never trained on."""
        self.ids += ids
        self.mask += [0.0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages.append({"role": observation.role, "content": observation.text})

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """Every turn but the policy's last; empty where there was one turn."""
        return tuple(self.messages[:-1])

    def completion(self, step: int) -> Completion:
        """The episode as a reward sees it after `step` steps."""
        own = tuple(i for i, mine in zip(self.ids, self.mask, strict=True) if mine)
        messages = None if self.prompt.messages is None else (*self.prompt.messages, *self.messages)
        return Completion(self.prompt, own, self.text, self.finish, messages, step)


# The episodes that continue, each with its number, and the turn (0-based) that is to be written → that turn of each
WriteTurns = Callable[[Sequence[tuple[int, Episode]], int], Sequence[Rollout]]


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Plays episodes; without environments an episode is one turn.

    longest: most tokens of prompt and episode together, None = no limit. An episode without room for another turn is
    over, cut off; its last turn gets what room there is.
    """

    tokenizer: Any
    environments: EnvironmentFactory | None = None
    extend: ExtendConversation | None = None
    max_model_len: int | None = None

    def run_episodes(self, prompts: Sequence[Prompt], write: WriteTurns) -> list[Episode]:
        """An episode for each prompt, in their order."""
        episodes = [Episode(prompt) for prompt in prompts]
        partners = None if self.environments is None else self.environments.start_episodes(prompts)
        live, turn = list(enumerate(episodes)), 0
        while live:
            for (_, episode), rollout in zip(live, write(live, turn), strict=True):
                episode.append_action(rollout, completion_text(self.tokenizer, rollout.ids))
            live = [] if partners is None else self._step_environments(live, turn, partners)
            turn += 1
        return episodes

    def turn_token_limit(self, episode: Episode, max_new_tokens: int) -> int:
        """Maximum tokens of the episode's next turn. The first turn is not shortened (see data.max_length)."""
        if self.max_model_len is None or not episode.ids:
            return max_new_tokens
        return min(max_new_tokens, self.max_model_len - len(episode.prompt.ids) - len(episode.ids))

    def _step_environments(
        self, live: Sequence[tuple[int, Episode]], turn: int, partners: EnvironmentBatch
    ) -> list[tuple[int, Episode]]:
        """Add the environments' observations; return the episodes that continue."""
        assert self.environments is not None
        last = turn + 1 == self.environments.max_turns
        asking = [] if last else [(at, episode) for at, episode in live if episode.finish != "length"]
        observations = partners.step([(at, episode.text) for at, episode in asking]) if asking else []
        answered = zip(asking, observations, strict=True)
        return [
            one
            for one, observation in answered
            if observation is not None and self._append_observation(one[1], observation)
        ]

    def _append_observation(self, episode: Episode, observation: Observation) -> bool:
        """Append an observation; False where that leaves no room for a turn."""
        assert self.extend is not None
        ids = self.extend(episode.ids, {"role": observation.role, "content": observation.text})
        if (
            self.max_model_len is not None
            and len(episode.prompt.ids) + len(episode.ids) + len(ids) >= self.max_model_len
        ):
            episode.finish = "length"
            return False
        episode.append_observation(observation, ids)
        return True
