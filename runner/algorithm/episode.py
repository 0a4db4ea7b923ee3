r"""Episodes: the turns of a policy and its environment, token by token.

    prompt ──▶ policy ──turn──▶ environment ──text──▶ policy ──turn──▶ … until the environment returns None

The same for sampled answers, which are trained on, and for greedy ones, which are evaluated. `extend` writes an
observation as the chat template does; the policy's own tokens are never written as text and tokenized again:

    … answer<|im_end|> │ \n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n │ next answer …
                       └────────────────── ids of an observation ─────────────────┘
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import sub
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from runner.core.completion_text import completion_text
from runner.interfaces import (
    Completion,
    EnvironmentReply,
    Environments,
    EpisodeBatch,
    EpisodeResult,
    ExtendConversation,
    Prompt,
    Request,
    Rollout,
)
from runner.interfaces.sampling import sample_from

if TYPE_CHECKING:
    from runner.interfaces.sampling import Experts

FAILED = "failed"  # the finish of an episode that its environment did not play to the end


@dataclass(slots=True)
class Episode:
    """An unfinished sample: the policy's turns, and the environment's text between them.

    text: of the policy's last turn; messages: every turn so far; mask: 1 on the policy's own tokens; logprobs: at the
    sampling temperature, before truncation, NaN where the sampler cannot report them; truncation: Σ (log q − log p)
    over the policy's tokens, q the truncated distribution and p the whole one; version, versions: see `Rollout`, of all
    turns, version the oldest; result: what the environment knows at the end; counts: see `EnvironmentReply`, and turns;
    experts: see `Rollout`, of the prompt and the whole episode; extra_rows: further rows of the same episode
    (`runner.algorithm.program_episodes`)
    """

    prompt: Prompt
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("q"))
    mask: array[float] = field(default_factory=lambda: array("d"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    truncation: float = 0.0
    text: str = ""
    finish: str = ""
    version: int = 0
    versions: list[int] = field(default_factory=list)
    result: EpisodeResult | None = None
    counts: Counter[str] = field(default_factory=Counter)
    experts: Experts | None = None
    extra_rows: list[Episode] = field(default_factory=list)

    def append_action(self, rollout: Rollout, text: str) -> None:
        """A turn of the policy."""
        self.ids.extend(rollout.ids)
        self.mask += array("d", [1.0]) * len(rollout.ids)
        raw = rollout.raw_logprobs or array("d", [math.nan]) * len(rollout.ids)
        self.logprobs.extend(raw)
        if raw is not rollout.logprobs:
            self.truncation += math.fsum(map(sub, rollout.logprobs, raw))
        self.messages.append({"role": "assistant", "content": text})
        self.text, self.finish = text, rollout.finish
        self.version = rollout.version if len(self.messages) == 1 else min(self.version, rollout.version)
        self.versions += rollout.versions
        if rollout.experts is not None:  # of tokens of earlier turns those that they were drawn with
            known = self.experts if self.experts is not None else rollout.experts[:0]
            self.experts = np.concatenate([known, rollout.experts[len(known) :]])

    def append_observation(self, messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> None:
        """Messages of the environment: context, never trained on."""
        self.ids.extend(ids)
        self.mask += array("d", [0.0]) * len(ids)
        self.logprobs += array("d", [0.0]) * len(ids)
        self.messages += messages

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """Every turn but the policy's last; empty where there was one turn."""
        return tuple(self.messages[:-1])

    def completion(self, step: int) -> Completion:
        """The episode as a reward sees it after `step` steps."""
        rows = (*self.extra_rows, self)
        own = tuple(chain.from_iterable(np.asarray(row.ids)[np.asarray(row.mask) > 0].tolist() for row in rows))
        messages = None if self.prompt.messages is None else (*self.prompt.messages, *self.messages)
        return Completion(self.prompt, own, self.text, self.finish, messages, step, self.result)


def rollout_text(tokenizer: Any, rollout: Rollout) -> str:
    """The text of a rollout, decoded here unless its sampler did so."""
    return completion_text(tokenizer, rollout.ids) if rollout.text is None else rollout.text


class AnswerSampler(Protocol):
    """What a `Sampler` does of collecting answers."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def max_model_len(self) -> int | None: ...

    def sample(self, requests: Sequence[Request]) -> list[Rollout]: ...


MakeRequest = Callable[[int, Episode, int], Request]  # of number, episode, turn (0-based)
WAIT_S = 1.0  # at a time, for a reply


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

    def run_episodes(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], request: MakeRequest, sampler: AnswerSampler
    ) -> list[Episode]:
        """An episode for each prompt, in their order; seeds: of the environments (see `Environments`)."""
        if self.environments is None:
            episodes = [Episode(prompt) for prompt in prompts]
            drawn = sampler.sample([request(at, one, 0) for at, one in enumerate(episodes)])
            for episode, rollout in zip(episodes, drawn, strict=True):
                self.append_turn(episode, rollout)
            return episodes
        batch = self.environments.start_episodes(prompts, seeds)
        try:
            played = EpisodesInPlay(self, batch, request, lockstep=self.environments.lockstep)
            sample_from(sampler, played)
            for episode, result in zip(played.episodes, batch.results(), strict=True):
                episode.result = result
                episode.finish = FAILED if result.failure else episode.finish
        finally:
            batch.close()
        return played.episodes

    def turn_token_limit(self, episode: Episode, max_new_tokens: int) -> int:
        """Maximum tokens of the episode's next turn."""
        own = None if self.environments is None else self.environments.max_episode_tokens
        limits = [] if own is None else [own - len(episode.ids)]
        # without an environment, which may have made the prompt longer, data.max_length leaves room for the turn
        if self.max_model_len is not None and self.environments is not None:
            limits.append(self.max_model_len - len(episode.prompt.ids) - len(episode.ids))
        return min([max_new_tokens, *limits])

    def append_turn(self, episode: Episode, rollout: Rollout) -> None:
        """A turn of the policy."""
        episode.append_action(rollout, rollout_text(self.tokenizer, rollout))

    def append_reply(self, episode: Episode, reply: EnvironmentReply, *, is_last: bool) -> bool:
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


class EpisodesInPlay:
    """Episodes as a `RequestSource`: the next turn of each is sampled when the last one has its reply.

    lockstep: not before all episodes have theirs
    """

    def __init__(self, runner: EpisodeRunner, batch: EpisodeBatch, request: MakeRequest, *, lockstep: bool) -> None:
        self.episodes = [Episode(prompt) for prompt, _ in batch.starts]
        self._runner, self._batch, self._request, self._lockstep = runner, batch, request, lockstep
        self._turns = [0] * len(self.episodes)  # that were sampled
        self._ready, self._sampled, self._in_step = list[int](), set[int](), set[int]()
        for at, (_, failure) in enumerate(batch.starts):
            if not failure and runner.turn_token_limit(self.episodes[at], 1) >= 1:
                self._ready.append(at)
            elif not failure:  # the tools leave no room for a turn
                self._end(at, "length")

    def take(self, wait: bool) -> list[tuple[int, Request]]:
        """See `RequestSource`; in the order of the episodes."""
        if not (self._lockstep and self._sampled):
            self._receive(wait)
        arrived = sorted(self._ready)
        self._ready.clear()
        self._sampled.update(arrived)
        return [(at, self._request(at, self.episodes[at], self._turns[at])) for at in arrived]

    def answer(self, number: int, rollout: Rollout) -> None:
        """See `RequestSource`."""
        episode = self.episodes[number]
        self._runner.append_turn(episode, rollout)
        self._sampled.remove(number)
        self._turns[number] += 1
        episode.counts["turns"] += 1
        if episode.finish == "length":
            self._end(number, "length")
        else:
            self._in_step.add(number)
            self._batch.submit(number, episode.text, self._is_last(number))

    def _receive(self, wait: bool) -> None:
        """Add the replies that have come.

        wait: until an episode continues, in lockstep until each has its reply
        """
        while self._in_step:
            waits = wait and (self._lockstep or not self._ready)
            for number, reply in self._batch.replies(WAIT_S if waits else 0.0):
                self._in_step.remove(number)
                if self._runner.append_reply(self.episodes[number], reply, is_last=self._is_last(number)):
                    self._ready.append(number)
                else:
                    self._end(number, self.episodes[number].finish)
            if not waits:
                return

    def _is_last(self, number: int) -> bool:
        assert self._runner.environments is not None
        return self._turns[number] == self._runner.environments.max_turns

    def _end(self, number: int, finish: str) -> None:
        self.episodes[number].finish = finish
        self._batch.end_episode(number)
