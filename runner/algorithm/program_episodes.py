"""Episodes of programs that call the policy: each call becomes a turn of a row of token ids.

call: its prompt begins with all ids of a row    ──▶ the row continues: new context, then the turn
      anything else (another conversation, a     ──▶ a new row, whose prompt is context: no turn is trained on twice
      branch, a history that was rewritten)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from runner.algorithm.episode import FAILED, AnswerSampler, Episode
from runner.core.completion_text import completion_text
from runner.core.media import without_media
from runner.core.rng import derive_seed
from runner.interfaces import EpisodeResult, Prompt, Request, Rollout
from runner.interfaces.environments import PolicyCall, ProgramEnvironments


def run_programs(
    environments: ProgramEnvironments,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampler: AnswerSampler,
    streams: Sequence[tuple[int | str, ...]],
    tokenizer: Any,
) -> list[Episode]:
    """An episode for each prompt, in their order.

    seeds: of the environments (see `Environments`); streams: names of each episode's random streams
    """
    rows = [list[Episode]() for _ in prompts]
    counts = [Counter[str](turns=0, rows=0, unmatched_histories=0) for _ in prompts]
    batch = environments.start_programs(prompts, seeds)
    try:
        while (calls := batch.next_calls()) is not None:
            rollouts = sample_calls(sampler, streams, calls) if calls else ()
            for call, rollout in zip(calls, rollouts, strict=True):
                if rollout is not None:
                    add_turn(rows[call.episode], prompts[call.episode].columns, call, rollout, tokenizer)
                    counts[call.episode].update(turns=1, unmatched_histories=int(call.is_unmatched))
            batch.answer(calls, rollouts)
        results = batch.finish()
    finally:
        batch.close()
    return [_join_rows(*one) for one in zip(prompts, rows, counts, results, strict=True)]


def sample_calls(
    sampler: AnswerSampler, streams: Sequence[tuple[int | str, ...]], calls: Sequence[PolicyCall]
) -> list[Rollout | None]:
    """The turns that programs call for; None where the prompt leaves no room for a token."""
    most, longest = sampler.max_new_tokens, sampler.max_model_len
    requests, groups = dict[int, Request](), dict[tuple[int, ...], int]()
    for at, call in enumerate(calls):
        rooms = [most if call.max_new_tokens is None else call.max_new_tokens]
        rooms += [] if longest is None else [longest - len(call.ids)]
        if (limit := min(most, *rooms)) > 0:
            seed = derive_seed(*streams[call.episode], call.key)  # type: ignore[arg-type]
            requests[at] = Request(call.ids, seed, limit, groups.setdefault(call.ids, len(groups)), raw=True)
    rollouts = dict(zip(requests, sampler.sample([*requests.values()]), strict=True))
    return [rollouts.get(at) for at in range(len(calls))]


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
