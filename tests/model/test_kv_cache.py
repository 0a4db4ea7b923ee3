"""Rows that grow together, join and leave, against whole rows through the plain model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba import MambaConfig, MambaForCausalLM

from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.interfaces.model import CachedDecoder
from runner.model import decoder_choice, kv_cache
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.generation import CompletionGenerator
from runner.model.kv_cache import ContinuousBatchDecoder, RecomputeBatchDecoder, WaveBatchDecoder
from runner.model.tiny import byte_tokenizer
from tests.model.zoo import SHAPE, VOCAB, ZOO, causal, greedy, module, rows

PLAIN = module("qwen3").double()


@torch.no_grad()
def last_logits(plain: Any, row: Sequence[int]) -> Tensor:
    return plain(input_ids=torch.tensor([list(row)]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("way", [ContinuousBatchDecoder, WaveBatchDecoder])
@pytest.mark.parametrize("kind", ZOO)
def test_every_kind_of_model_can_be_decoded(
    kind: str, way: type[ContinuousBatchDecoder] | type[WaveBatchDecoder]
) -> None:
    assert decoder_choice.decoder_objection(module(kind), way) is None


def test_a_wrong_answer_is_an_objection(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, forward = module("llama"), kv_cache.CachedForward.__call__
    monkeypatch.setattr(
        kv_cache.CachedForward,
        "__call__",
        lambda s, ids, mask, positions, cache: forward(s, ids, None, positions, cache),
    )
    for way in (ContinuousBatchDecoder, WaveBatchDecoder):
        assert "differ from those of full sequences" in str(decoder_choice.decoder_objection(plain, way))


def mamba() -> Any:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, initializer_range=0.5)
    return MambaForCausalLM(config).eval()


def test_a_model_without_such_a_cache_is_computed_anew_and_says_so() -> None:
    decide = Decisions()
    assert decoder_choice.choose_decoder(mamba(), decide) is kv_cache.RecomputeBatchDecoder
    assert "slow instead of KV cache (its forward has no cache argument" in str(decide.entries[-1])


def test_a_model_that_cannot_compute_alone_either_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mamba()
    monkeypatch.setattr(broken, "forward", lambda **keywords: 1 / 0)
    with pytest.raises(SpecError, match=r"MambaForCausalLM: generation failed: .*without a cache: .*ZeroDivision"):
        decoder_choice.choose_decoder(broken, Decisions())


def test_a_model_without_such_a_cache_answers_all_the_same() -> None:
    model, prompt, wanted = CausalLM(mamba(), byte_tokenizer(512), TinyConfig(), decide=Decisions(), seed=0), [7, 3], []
    for _ in range(6):
        wanted.append(int(last_logits(mamba(), [*prompt, *wanted]).argmax()))
    assert greedy(model, [prompt], 6) == [wanted]
    assert greedy(model, [[3], prompt, prompt, [9, 1, 4]], 6)[1:3] == [wanted, wanted]


@pytest.mark.parametrize("seed", range(8))
def test_rows_may_join_and_leave_at_any_time(seed: int) -> None:
    chance = random.Random(seed)
    waiting = [tuple(row) for row in rows((2, 5, 1, 9, 3, 5, 70))] * 2
    decoder, live = ContinuousBatchDecoder(PLAIN, rows=4), list[tuple[int, ...]]()
    decoder.expect(waiting)
    while waiting or live:
        gone = [row for row in range(len(live)) if chance.random() < 0.2]
        room = min(4 - len(live) + len(gone), len(waiting))
        if room and (len(gone) == len(live) or chance.random() < 0.4):
            new = [waiting.pop(0) for _ in range(chance.randint(1, room))]
            places = [*gone, *range(len(live), 4)][: len(new)]
            check(decoder.admit(new, places), new)
            for place, row in zip(places, new, strict=True):
                live[place : place + 1] = [row]
            gone = gone[len(new) :]
        left = decoder.evict(gone)
        assert sorted([*left, *gone]) == list(range(len(live)))
        live = [live[row] for row in left]
        if live and chance.random() < 0.7:
            tokens = [chance.randrange(256) for _ in live]
            live = [(*row, token) for row, token in zip(live, tokens, strict=True)]
            check(decoder.step(tokens), live)


def check(logits: Tensor, live: list[tuple[int, ...]]) -> None:
    wanted = torch.stack([last_logits(PLAIN, row) for row in live])
    torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=1e-9)


@dataclass
class GrowingRow:
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    logits: list[Tensor] = field(default_factory=list)


def closed_batch(decoder: CachedDecoder, rows: Sequence[GrowingRow], max_rows: int, lengths: Sequence[int]) -> None:
    """Reference of a closed batch: written down as one loop, with the places of rows kept by hand."""
    waiting = deque(sorted(range(len(rows)), key=lambda i: (-len(rows[i].prompt_ids), rows[i].prompt_ids)))
    decoder.expect([rows[at].prompt_ids for at in waiting])
    live: list[int] = []

    def choose(logits: Tensor, numbers: Sequence[int]) -> None:
        pick([rows[at] for at in numbers], logits, [lengths[at] for at in numbers])

    while waiting or live:
        over = [place for place, at in enumerate(live) if rows[at].is_finished]
        room = max_rows - len(live) + len(over)
        if waiting and room and (decoder.admits_any_time or not live):
            new = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            places = [*over, *range(len(live), max_rows)][: len(new)]
            logits = decoder.admit([rows[at].prompt_ids for at in new], places)
            for place, at in zip(places, new, strict=True):
                live[place : place + 1] = [at]
            choose(logits, new)
        elif over:
            live = [live[place] for place in decoder.evict(over)]
        else:
            choose(decoder.step([rows[at].ids[-1] for at in live]), live)


def pick(rows: Sequence[GrowingRow], logits: Tensor, lengths: Sequence[int]) -> None:
    for row, found, length in zip(rows, logits, lengths, strict=True):
        row.ids.append(int(found.argmax()))
        row.logits.append(found)
        row.is_finished = len(row.ids) == length


@pytest.mark.parametrize("max_rows", [1, 3, 64])
@pytest.mark.parametrize("way", [ContinuousBatchDecoder, WaveBatchDecoder, RecomputeBatchDecoder])
def test_a_closed_batch_has_the_bytes_of_the_reference(way: Any, max_rows: int) -> None:
    plain = module("qwen3")
    prompts = [tuple(row) for row in rows((3, 9, 1, 17, 40, 9))] * 2
    lengths = [1 + 5 * at % 13 for at in range(len(prompts))]
    wanted, got = ([GrowingRow(prompt) for prompt in prompts] for _ in range(2))
    with torch.no_grad():
        closed_batch(way(plain, max_rows), wanted, max_rows, lengths)
    length_of = {id(row): length for row, length in zip(got, lengths, strict=True)}
    writer = CompletionGenerator(plain, frozenset(), way, torch.no_grad)
    writer.decode(got, lambda logits, rows: pick(rows, logits, [length_of[id(row)] for row in rows]), max_rows)
    for row, other in zip(wanted, got, strict=True):
        assert row.ids == other.ids and all(map(torch.equal, row.logits, other.logits))


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "llama4", "bloom"])
def test_likeliest_ids_are_those_of_another_implementation(kind: str) -> None:
    model, prompts = causal(kind), rows((3, 12, 1, 12))
    answers = [GrowingRow(tuple(prompt)) for prompt in prompts]

    def choose(logits: Tensor, asked: Sequence[GrowingRow]) -> None:
        for row, token in zip(asked, logits.argmax(-1).tolist(), strict=True):
            row.ids.append(token)
            row.is_finished = token == SHAPE["eos_token_id"] or len(row.ids) == 20

    model.batch_decoder(decide=Decisions()).decode(answers, choose, max_rows=3)
    got = [[i for i in ids if i != SHAPE["eos_token_id"]] for ids in (row.ids for row in answers)]
    assert got == greedy(model, prompts, 20) == [_generated(kind, prompt, 20) for prompt in prompts]


def _generated(kind: str, prompt: Sequence[int], most: int) -> list[int]:
    """transformers' greedy answer to one prompt."""
    options = {"do_sample": False, "max_new_tokens": most, "pad_token_id": 0}
    ids = module(kind).generate(torch.tensor([list(prompt)]), **options)[0, len(prompt) :].tolist()
    return [i for i in ids if i != SHAPE["eos_token_id"]]
