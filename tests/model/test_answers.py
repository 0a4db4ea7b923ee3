"""Greedy answers: the same however many are in work, as long as the model allows, and no forward too many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tests.model.test_folded import adapted, calls_of_adapters
from tests.model.zoo import SHAPE, causal, greedy, module, rows

END = SHAPE["eos_token_id"]
PROMPTS = rows((5, 1, 11, 3, 30, 4, 4, 9, 17))


@torch.no_grad()
def alone(plain: nn.Module, prompt: Sequence[int], most: int) -> list[int]:
    """The greedy answer by whole rows, one token after another."""
    ids = list(prompt)
    for _ in range(most):
        token = int(plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == END:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gpt2"])
def test_an_answer_does_not_depend_on_how_many_are_in_work(kind: str) -> None:
    model, plain = causal(kind), module(kind)
    wanted = [alone(plain, prompt, 12) for prompt in PROMPTS]
    assert all(greedy(model, PROMPTS, 12, size) == wanted for size in (1, 4, 32))


def test_an_answer_that_ends_makes_room_for_the_next_question() -> None:
    model = causal("qwen3")
    calls: list[torch.Size] = []
    model.causal.register_forward_pre_hook(lambda _, a, more: calls.append(more["input_ids"].shape), with_kwargs=True)

    def forwards(batches: list[list[list[int]]]) -> tuple[int, list[list[int]]]:
        """How many forwards of one token for each row."""
        calls.clear()
        # ids that many answers soon have end them at very different lengths
        made = [one for many in batches for one in greedy(model, many, 24, 4, stop_token_ids=tuple(range(0, END, 11)))]
        return sum(columns == 1 for _, columns in calls), made

    prompts = [[*PROMPTS[0], at] for at in range(40)]
    probed = forwards([[]])[0]  # finds out how the model writes
    refilled, answers = forwards([prompts])
    batched, same = forwards([prompts[at : at + 4] for at in range(0, 40, 4)])
    lengths = [len(one) for one in answers]
    assert answers == same and len(set(lengths)) > 3
    assert refilled - probed < sum(lengths) / 4 + max(lengths) + 4 < batched - 10 * probed


def test_adapters_are_folded_into_the_weights() -> None:
    model = adapted()
    with model._generation_mode():
        wanted = [alone(model.causal, prompt, 8) for prompt in PROMPTS]
    calls = calls_of_adapters(model)
    greedy(model, [], 1)
    probing = len(calls)
    calls.clear()
    assert greedy(model, PROMPTS, 8, 3) == wanted
    assert len(calls) == probing


@pytest.mark.parametrize(("kind", "name"), [("qwen3", "max_position_embeddings"), ("gpt2", "n_positions")])
def test_an_answer_ends_where_the_model_takes_no_longer_row(kind: str, name: str) -> None:
    positions = 20
    model, plain = causal(kind, **{name: positions}), module(kind, **{name: positions})
    got = greedy(model, PROMPTS, 12, 4)
    assert got == [alone(plain, prompt, max(0, min(12, positions - len(prompt)))) for prompt in PROMPTS]
    assert got[4] == [], "the prompt alone is longer"
    assert {len(one) for one in got} >= {0, 3, 9, 12}
