r"""Episodes: the turns of a policy and its environment, token by token.

    prompt ──▶ policy ──turn──▶ environment ──text──▶ policy ──turn──▶ … until the environment returns None

The same for sampled answers, which are trained on, and for greedy ones, which are evaluated. `extend` writes an
observation as the chat template does; the policy's own tokens are never written as text and tokenized again:

    … answer<|im_end|> │ \n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n │ next answer …
                       └────────────────── ids of an observation ─────────────────┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.core.completion_text import completion_text
from runner.interfaces import (
    Completion,
    EnvironmentReply,
    Environments,
    EpisodeBatch,
    EpisodeResult,
    ExtendConversation,
    Prompt,
    Rollout,
)

FAILED = "failed"  # the finish of an episode that its environment did not play to the end


@dataclass(slots=True)
class Episode:
    """An unfinished sample: the policy's turns, and the environment's text between them.

    text: of the policy's last turn; messages: every turn so far; mask: 1 on the policy's own tokens; logprobs: at the
    sampling temperature, before truncation, NaN where the sampler cannot report them; truncation: Σ (log q − log p)
    over the policy's tokens, q the truncated distribution and p the whole one; version, versions: see `Rollout`, of all
    turns, version the oldest; result: what the environment knows at the end; counts: see `EnvironmentReply`;
    extra_rows: further rows of the same episode (`runner.algorithm.program_episodes`)
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
    result: EpisodeResult | None = None
    counts: Counter[str] = field(default_factory=Counter)
    extra_rows: list[Episode] = field(default_factory=list)

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

    def append_observation(self, messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> None:
        """Messages of the environment: context, never trained on."""
        self.ids += ids
        self.mask += [0.0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages += messages

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """Every turn but the policy's last; empty where there was one turn."""
        return tuple(self.messages[:-1])

    def completion(self, step: int) -> Completion:
        """The episode as a reward sees it after `step` steps."""
        own = tuple(i for i, mine in zip(self.ids, self.mask, strict=True) if mine)
        messages = None if self.prompt.messages is None else (*self.prompt.messages, *self.messages)
        return Completion(self.prompt, own, self.text, self.finish, messages, step, self.result)


# The episodes that continue, each with its number, and the turn (0-based) that is to be written → that turn of each
WriteTurns = Callable[[Sequence[tuple[int, Episode]], int], Sequence[Rollout]]


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Plays episodes; without environments an episode is one turn.

    max_model_len: most tokens of prompt and episode together, None = no limit. An episode without room for another turn
    is over, cut off; its last turn gets what room there is.
    """

    tokenizer: Any
    environments: Environments | None = None
    extend: ExtendConversation | None = None
    max_model_len: int | None = None

    def run_episodes(self, prompts: Sequence[Prompt], write: WriteTurns, seeds: Sequence[int]) -> list[Episode]:
        """An episode for each prompt, in their order; seeds: of the environments (see `Environments`)."""
        if self.environments is None:
            episodes = [Episode(prompt) for prompt in prompts]
            self._write(list(enumerate(episodes)), 0, write)
            return episodes
        batch = self.environments.start_episodes(prompts, seeds)
        try:
            episodes = [Episode(prompt) for prompt, _ in batch.starts]
            live = [(at, episodes[at]) for at, (_, failure) in enumerate(batch.starts) if not failure]
            for _, episode in live:
                if self.turn_token_limit(episode, 1) < 1:  # the tools leave no room for a turn
                    episode.finish = "length"
            live, turn = [(at, episode) for at, episode in live if episode.finish != "length"], 0
            while live:
                self._write(live, turn, write)
                live, turn = self._step_environments(live, turn, batch), turn + 1
            for episode, result in zip(episodes, batch.finish(), strict=True):
                episode.result = result
                episode.finish = FAILED if result.failure else episode.finish
        finally:
            batch.close()
        return episodes

    def turn_token_limit(self, episode: Episode, max_new_tokens: int) -> int:
        """Maximum tokens of the episode's next turn."""
        own = None if self.environments is None else self.environments.max_episode_tokens
        limits = [] if own is None else [own - len(episode.ids)]
        # without an environment, which may have made the prompt longer, data.max_length leaves room for the turn
        if self.max_model_len is not None and self.environments is not None:
            limits.append(self.max_model_len - len(episode.prompt.ids) - len(episode.ids))
        return min([max_new_tokens, *limits])

    def _write(self, live: Sequence[tuple[int, Episode]], turn: int, write: WriteTurns) -> None:
        for (_, episode), rollout in zip(live, write(live, turn), strict=True):
            episode.append_action(rollout, completion_text(self.tokenizer, rollout.ids))

    def _step_environments(
        self, live: Sequence[tuple[int, Episode]], turn: int, batch: EpisodeBatch
    ) -> list[tuple[int, Episode]]:
        """Add what the environments say; return the episodes that continue."""
        assert self.environments is not None
        is_last = turn + 1 == self.environments.max_turns
        whole = [(at, episode) for at, episode in live if episode.finish != "length"]
        replies = batch.step([(at, episode.text) for at, episode in whole], is_last) if whole else []
        return [one for one, reply in zip(whole, replies, strict=True) if self._apply(one[1], reply, is_last)]

    def _apply(self, episode: Episode, reply: EnvironmentReply, is_last: bool) -> bool:
        """Add what an environment says; False where the episode is over, or has no room for another turn."""
        assert self.extend is not None
        episode.counts.update(reply.counts)
        if reply.turn is not None:
            episode.messages[-1] = reply.turn
        if is_last or reply.failure or not reply.messages:
            return False
        ids = self.extend(episode.ids, reply.messages)
        if self.turn_token_limit(episode, len(ids) + 1) <= len(ids):
            episode.finish = "length"
            return False
        episode.append_observation(reply.messages, ids)
        return True
