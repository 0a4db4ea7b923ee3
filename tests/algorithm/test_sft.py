"""The cross-entropy of sft and cpt against a direct computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from runner.algorithm.config import CptConfig, SftConfig
from runner.algorithm.sft import CrossEntropy, build
from runner.core.batch import pack, with_totals
from runner.core.metrics import Metrics
from runner.core.micro_batches import micro_batches
from runner.interfaces import EvalQuestion, TokenizedExample
from runner.interfaces.learning import AlgorithmInputs
from tests.algorithm.harness import make_model

ITEMS = [
    TokenizedExample((1, 2, 3), (0.0, 1.0, 1.0)),
    TokenizedExample((4, 5), (0.0, 1.0)),
    TokenizedExample((6, 7, 8, 9), (0.0, 0.0, 0.0, 1.0)),
]


class ThreeItems:
    fingerprint = "x"

    def __len__(self) -> int:
        return 3

    def take(self, step: int, count: int, round: int = 0) -> Sequence[TokenizedExample]:
        return [ITEMS[(step * count + i) % 3] for i in range(count)]

    def held_out_questions(self) -> Sequence[EvalQuestion]:
        return []

    def held_out_items(self) -> Sequence[TokenizedExample]:
        return []


def parts() -> AlgorithmInputs:
    return AlgorithmInputs(ThreeItems(), tokenizer=None, seed=0, decide=lambda *words: None)


def test_the_loss_is_the_mean_over_the_steps_tokens_however_it_is_cut() -> None:
    batch = pack([i.ids for i in ITEMS], [i.weights for i in ITEMS])
    batch = with_totals(batch, batch.count())
    logprobs = torch.log(torch.rand(9, generator=torch.Generator().manual_seed(0)))
    direct = -logprobs[batch.tokens["weight"] > 0].mean()
    loss = CrossEntropy()
    for budget in (1, 5, 100):
        total, start = torch.zeros(()), 0
        for micro in micro_batches(batch, budget):
            part = logprobs[start : start + micro.num_tokens]
            value = loss(micro, {"logprobs": part}).total
            torch.testing.assert_close(value, (loss.grad_weights(micro) * part).sum())
            total, start = total + value, start + micro.num_tokens
        torch.testing.assert_close(total, direct)


def test_the_loss_may_be_the_mean_over_rows_however_it_is_cut() -> None:
    algorithm = build(SftConfig(batch_size=3, loss_aggregation="seq_mean_token_mean"), parts())
    loss: Any = algorithm.losses["policy"]
    batch = next(iter(algorithm.prepare(algorithm.collect(0), {})))
    logprobs = torch.log(torch.rand(9, generator=torch.Generator().manual_seed(0)))
    direct = -(logprobs[1:3].mean() + logprobs[4] + logprobs[8]) / 3
    for budget in (1, 5, 100):
        total, metrics, start = torch.zeros(()), Metrics(), 0
        for micro in micro_batches(batch, budget):
            part = logprobs[start : start + micro.num_tokens]
            value = loss(micro, {"logprobs": part})
            torch.testing.assert_close(value.total, (loss.grad_weights(micro) * part).sum())
            metrics.merge(value.metrics)
            total, start = total + value.total, start + micro.num_tokens
        torch.testing.assert_close(total, direct)
        assert metrics.result()["train/loss"] == pytest.approx(float(direct))


@pytest.mark.parametrize(("config", "tokens"), [(SftConfig, 4), (CptConfig, 6)])
def test_cpt_learns_every_token_and_sft_the_answers(config: type, tokens: int) -> None:
    algorithm = build(config(batch_size=3), parts())
    (batch,) = algorithm.prepare(algorithm.collect(0), {})
    assert batch.totals == {"tokens": tokens, "rows": 3, "units": 3}


def test_branches_of_an_item_train_as_rows_of_their_own_do() -> None:
    """The beginning that they share is computed once; loss and gradient are those of the rows one by one."""
    start, first, second = [257, 65, 66, 67], [68, 69, 258], [70, 71, 258]
    joined = TokenizedExample((*start, *first, *second), (*[0.0] * 4, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0), branches=(4, 7))
    alone = [
        TokenizedExample((*start, *first), (*[0.0] * 4, 0.0, 1.0, 1.0)),
        TokenizedExample((*start, *second), (*[0.0] * 4, 1.0, 1.0, 1.0)),
    ]
    found = []
    for items in ([joined, ITEMS[0]], [*alone, ITEMS[0]]):
        batch = pack([i.ids for i in items], [i.weights for i in items], [i.branches for i in items])
        batch = with_totals(batch, batch.count())
        model, loss = make_model(1), CrossEntropy()
        value, _ = model.linear_loss(batch, loss.grad_weights(batch))
        value.backward()
        found.append((value, *(p.grad for p in model.trainable().values())))
    assert len(found[0]) > 5
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    batch = pack([joined.ids], [joined.weights], [joined.branches])
    assert batch.tokens["parent"].tolist() == [-1, 0, 1, 2, 3, 4, 5, 3, 7, 8]
    assert batch.tokens["positions"].tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6]
    assert batch.rows["unit"].tolist() == [0, 0, 0] and batch.rows["lengths"].tolist() == [4, 3, 3]


def test_mini_batches_know_their_own_totals() -> None:
    algorithm = build(SftConfig(batch_size=2, mini_batches=2), parts())
    cut = list(algorithm.prepare(algorithm.collect(0), {}))
    assert [p.totals["tokens"] for p in cut] == [2, 1]
