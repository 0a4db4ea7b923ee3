"""Episodes of programs that call the policy: each call becomes a turn of a row of token ids.

call: its prompt begins with all ids of a row    ──▶ the row continues: new context, then the turn
      anything else (another conversation, a     ──▶ a new row, whose prompt is context: no turn is trained on twice
      branch, a history that was rewritten)
      its client had gone before the reply       ──▶ no turn: nobody read it
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from runner.algorithm.episode import FAILED, AnswerSampler, Episode, rollout_text
from runner.core.media import without_media
from runner.core.rng import derive_seed
from runner.interfaces import EpisodeResult, Prompt, Request, Rollout
from runner.interfaces.environments import PolicyCall, ProgramEnvironments, ProgramEpisodes
from runner.interfaces.sampling import sample_from

Stream = tuple[int, *tuple[int | str, ...]]  # the seed and the name of random numbers
GATHER_S = 0.5  # that calls wait at most for those of other programs, while nothing is sampled


def run_programs(
    environments: ProgramEnvironments,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampler: AnswerSampler,
    streams: Sequence[Stream],
    tokenizer: Any,
) -> list[Episode]:
    """An episode for each prompt, in their order.

    seeds: of the environments (see `Environments`); streams: of each episode
    """
    batch = environments.start_programs(prompts, seeds)
    try:
        source = ProgramCalls(batch, len(prompts), sampler, streams)
        sample_from(sampler, source)
        results = batch.results()
    finally:
        batch.close()
    return [_make_episode(*one, tokenizer) for one in zip(prompts, source.turns, results, strict=True)]


class ProgramCalls:
    """The calls of programs as a `RequestSource`.

    turns: of each episode, in the order in which they were sampled
    """

    def __init__(
        self, batch: ProgramEpisodes, num_episodes: int, sampler: AnswerSampler, streams: Sequence[Stream]
    ) -> None:
        self.turns = [list[tuple[PolicyCall, Rollout]]() for _ in range(num_episodes)]
        self._batch, self._sampler, self._streams = batch, sampler, streams
        self._numbers, self._calls = count(), dict[int, PolicyCall]()

    def take(self, wait: bool) -> list[tuple[int, Request]]:
        """See `RequestSource`. A call whose prompt leaves no room for a token is refused."""
        while (calls := self._batch.next_calls(GATHER_S if wait else 0.0)) is not None:
            arrived = [(call, limit) for call in calls if (limit := self._token_limit(call)) > 0]
            for call in calls:
                if self._token_limit(call) < 1:
                    self._batch.answer(call, None)
            if arrived or not wait:
                return [self._request(call, limit) for call, limit in arrived]
        return []

    def answer(self, number: int, rollout: Rollout) -> None:
        """See `RequestSource`."""
        call = self._calls.pop(number)
        self.turns[call.episode].append((call, rollout))
        self._batch.answer(call, rollout)

    def _token_limit(self, call: PolicyCall) -> int:
        most, longest = self._sampler.max_new_tokens, self._sampler.max_model_len
        rooms = [] if longest is None else [longest - len(call.ids)]
        return min(most, call.max_new_tokens or most, *rooms)

    def _request(self, call: PolicyCall, limit: int) -> tuple[int, Request]:
        number, seed = next(self._numbers), derive_seed(*self._streams[call.episode], call.key)
        self._calls[number] = call
        return number, Request(call.ids, seed, limit, number, raw=True)


def add_turn(
    rows: list[Episode], columns: Mapping[str, Any], call: PolicyCall, rollout: Rollout, tokenizer: Any
) -> None:
    """Add a turn to the row that the call continues, or to a new one; its row becomes the last."""
    at = next((at for at, row in enumerate(rows) if _continues(call.ids, row)), None)
    if at is None:
        text = str(tokenizer.decode(without_media(call.ids)))
        row = Episode(Prompt(call.ids, text, call.messages, columns))
    else:
        row = rows.pop(at)
        assert row.prompt.messages is not None
        said, size = call.messages[len(row.prompt.messages) :], len(row.messages)
        row.messages[:] = said[:size]  # the policy's last turn as a message with calls
        row.append_observation(said[size:], call.ids[len(row.prompt.ids) + len(row.ids) :])
    row.append_action(rollout, rollout_text(tokenizer, rollout))
    rows.append(row)


def _continues(ids: Sequence[int], row: Episode) -> bool:
    """Whether ids begin with all of a row's."""
    size = len(row.prompt.ids)
    return ids[:size] == row.prompt.ids and array("q", ids[size : size + len(row.ids)]) == row.ids


def _make_episode(
    prompt: Prompt, turns: Sequence[tuple[PolicyCall, Rollout]], result: EpisodeResult, tokenizer: Any
) -> Episode:
    """The episode: the row with its last turn, and the others beside it.

    Its counts are metrics environment/NAME.
    """
    rows = list[Episode]()
    read = [(call, rollout) for call, rollout in turns if call.key not in result.unread_calls]
    for call, rollout in read:
        add_turn(rows, prompt.columns, call, rollout, tokenizer)
    *others, episode = rows or [Episode(prompt)]
    episode.extra_rows, episode.result = others, result
    episode.counts = Counter(
        turns=len(read),
        rows=len(rows),
        unmatched_histories=sum(call.is_unmatched for call, _ in read),
        unread_turns=len(turns) - len(read),
    )
    if result.failure:
        episode.finish = FAILED
    elif any(rollout.finish == "length" for _, rollout in read):  # the program may have gone on
        episode.finish = "length"
    return episode
