"""Greedy answers: the same whatever they are written with, as long as the model allows, and no forward too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from runner.interfaces import GreedyOutput
from runner.model.generation import finish_at_limit
from tests.model.test_folded import adapted, calls_of_adapters
from tests.model.zoo import SHAPE, causal, module, rows

END = SHAPE["eos_token_id"]
PROMPTS = rows((5, 1, 11, 3, 30, 4, 4, 9, 17))


@torch.no_grad()
def alone(plain: nn.Module, prompt: Sequence[int], most: int) -> GreedyOutput:
    """The greedy answer by whole rows, one token after another."""
    ids = list(prompt)
    for _ in range(most):
        token = int(plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == END:
            return GreedyOutput(tuple(ids[len(prompt) :]), "stop")
        ids.append(token)
    return GreedyOutput(tuple(ids[len(prompt) :]), "length")


def own_generate(model: Any) -> Any:
    """The same model, as one that no `Writer` fits."""
    model.__dict__["_greedy_way"] = None
    return model


def by_prompt(ids: Sequence[int], limit: int) -> str | None:
    """Ends answers at very different lengths."""
    return "stop" if len(ids) > ids[0] % 13 else finish_at_limit(ids, limit)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gpt2"])
def test_an_answer_does_not_depend_on_how_many_are_in_work(kind: str) -> None:
    model, plain = causal(kind), module(kind)
    wanted = [alone(plain, prompt, 12) for prompt in PROMPTS]
    assert all(model.generate(PROMPTS, 12, size) == wanted for size in (1, 4, None))
    own_generate(model)
    assert all(model.generate(PROMPTS, 12, size) == wanted for size in (4, None))


def test_an_answer_that_ends_makes_room_for_the_next_question() -> None:
    model = causal("qwen3")
    model.generate(PROMPTS[:1], 1)  # finds out how the model writes
    calls: list[torch.Size] = []
    model.causal.register_forward_pre_hook(lambda _, a, more: calls.append(more["input_ids"].shape), with_kwargs=True)

    def forwards(batches: list[list[list[int]]]) -> tuple[int, list[GreedyOutput]]:
        calls.clear()
        made = [one for batch in batches for one in model.generate(batch, 24, 4, by_prompt)]
        assert max(rows for rows, columns in calls if columns == 1) == 4, "answers in work"
        return len(calls), made

    prompts = [[*PROMPTS[0], at] for at in range(40)]
    refilled, answers = forwards([prompts])
    batched, same = forwards([prompts[at : at + 4] for at in range(0, 40, 4)])
    lengths = [len(one.ids) for one in answers]
    assert answers == same and len(set(lengths)) > 3
    assert refilled < sum(lengths) / 4 + max(lengths) + 4 < batched


def test_adapters_are_folded_into_the_weights() -> None:
    model = adapted()
    with model._generation_mode():
        wanted = [alone(model.causal, prompt, 8) for prompt in PROMPTS]
    model.generate(PROMPTS[:1], 1)
    calls = calls_of_adapters(model)
    assert model.generate(PROMPTS, 8, 3) == wanted
    assert not calls


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("qwen3", "max_position_embeddings"), ("gpt2", "n_positions")])
def test_an_answer_ends_where_the_model_takes_no_longer_row(kind: str, name: str, own: bool) -> None:
    positions = 20
    model, plain = causal(kind, **{name: positions}), module(kind, **{name: positions})
    got = (own_generate(model) if own else model).generate(PROMPTS, 12, 4)
    for prompt, answer in zip(PROMPTS, got, strict=True):
        wanted = alone(plain, prompt, max(0, min(12, positions - len(prompt))))
        assert answer == wanted and len(prompt) + len(answer.ids) <= max(positions, len(prompt))
    assert got[4] == GreedyOutput((), "length"), "the prompt alone is longer"
    assert {len(one.ids) for one in got} >= {0, 3, 9, 12} and got[8].finish == "length"


@pytest.mark.parametrize("own", [False, True])
def test_an_answer_ends_where_it_is_told_to_and_keeps_what_ended_it(own: bool) -> None:
    model = causal("qwen3")
    free = model.generate(PROMPTS, 12)
    got = (own_generate(model) if own else model).generate(PROMPTS, 12, 4, by_prompt)
    for whole, cut in zip(free, got, strict=True):
        length = whole.ids[0] % 13 + 1
        assert cut == (GreedyOutput(whole.ids[:length], "stop") if length <= len(whole.ids) else whole)
    assert any(len(cut.ids) < len(whole.ids) for whole, cut in zip(free, got, strict=True))


@pytest.mark.parametrize("own", [False, True])
def test_an_empty_prompt_is_refused(own: bool) -> None:
    model = causal("qwen3")
    with pytest.raises(ValueError, match="at least one token"):
        (own_generate(model) if own else model).generate([[1], []], 3)
