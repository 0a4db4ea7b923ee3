"""Episodes of programs that call the policy: each call becomes a turn of a row of token ids.

call: its prompt begins with all ids of a row    ──▶ the row continues: new context, then the turn
      anything else (another conversation, a     ──▶ a new row, whose prompt is context: no turn is trained on twice
      branch, a history that was rewritten)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from runner.algorithm.episode import FAILED, AnswerSampler, Episode
from runner.core.completion_text import completion_text
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
        source = ProgramCalls(batch, prompts, sampler, streams, tokenizer)
        sample_from(sampler, source)
        results = batch.results()
    finally:
        batch.close()
    return [_join_rows(*one) for one in zip(prompts, source.rows, source.counts, results, strict=True)]


class ProgramCalls:
    """The calls of programs as a `RequestSource`.

    rows, counts: of each episode; counts are for metrics environment/NAME
    """

    def __init__(
        self,
        batch: ProgramEpisodes,
        prompts: Sequence[Prompt],
        sampler: AnswerSampler,
        streams: Sequence[Stream],
        tokenizer: Any,
    ) -> None:
        self.rows = [list[Episode]() for _ in prompts]
        self.counts = [Counter[str](turns=0, rows=0, unmatched_histories=0) for _ in prompts]
        self._batch, self._prompts, self._sampler = batch, prompts, sampler
        self._streams, self._tokenizer = streams, tokenizer
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
        add_turn(self.rows[call.episode], self._prompts[call.episode].columns, call, rollout, self._tokenizer)
        self.counts[call.episode].update(turns=1, unmatched_histories=int(call.is_unmatched))
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
    row.append_action(rollout, completion_text(tokenizer, rollout.ids))
    rows.append(row)


def _continues(ids: Sequence[int], row: Episode) -> bool:
    """Whether ids begin with all of a row's."""
    size = len(row.prompt.ids)
    return ids[:size] == row.prompt.ids and list(ids[size : size + len(row.ids)]) == row.ids


def _join_rows(prompt: Prompt, rows: Sequence[Episode], counts: Counter[str], result: EpisodeResult) -> Episode:
    """The episode: the row with its last turn, and the others beside it."""
    *others, episode = rows or [Episode(prompt)]
    counts["rows"] = len(rows)
    episode.extra_rows, episode.counts, episode.result = others, counts, result
    if result.failure:
        episode.finish = FAILED
    return episode
