"""Aggregation weights against the definitions, and their independence of how a step is cut."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm.policy import losses
from tests.algorithm.ragged import Rows, rows

CONSTANT = 7.5
Weigh = Callable[[Tensor, Tensor, Tensor, dict[str, int]], Tensor]

WEIGHTS: dict[str, Weigh] = {
    "token_mean": lambda mask, row, tree, totals: losses.token_mean(mask, totals["tokens"]),
    "seq_mean_token_mean": lambda mask, row, tree, totals: losses.seq_mean_token_mean(mask, row, totals["rows"]),
    "seq_mean_token_sum": lambda mask, row, tree, totals: losses.seq_mean_token_sum(mask, totals["rows"]),
    "seq_mean_token_sum_norm": lambda mask, row, tree, totals: losses.seq_mean_token_sum_norm(
        mask, totals["rows"], CONSTANT
    ),
    "prompt_mean": lambda mask, row, tree, totals: losses.prompt_mean(mask, tree, totals["prompts"]),
}


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def reference(name: str, losses: list[list[float]], prompts: list[list[list[float]]]) -> float:
    """losses: of the trained tokens of each row; prompts: the same, gathered by prompt."""
    filled = [row for row in losses if row]
    if name == "token_mean":
        return mean([x for row in losses for x in row])
    if name == "seq_mean_token_mean":
        return mean([mean(row) for row in filled])
    if name == "prompt_mean":
        joined = [[x for row in prompt for x in row] for prompt in prompts]
        return mean([mean(p) for p in joined if p])
    return mean([math.fsum(row) for row in filled]) / (CONSTANT if name.endswith("norm") else 1)


def trees_of(ragged: Rows) -> list[int]:
    """Two rows to a prompt."""
    return [n // 2 for n in range(len(ragged.masks))]


def totals_of(ragged: Rows) -> dict[str, int]:
    learnt = ragged.learnt
    filled = {tree for tree, row in zip(trees_of(ragged), learnt, strict=True) if row}
    return {"tokens": sum(map(len, learnt)), "rows": sum(map(bool, learnt)), "prompts": len(filled)}


def tree_of_tokens(ragged: Rows) -> Tensor:
    return torch.tensor(trees_of(ragged), dtype=torch.int64)[ragged.row] * 1000 - 500  # any ids will do


@pytest.mark.parametrize("name", WEIGHTS)
@given(rows())
def test_the_weighted_sum_is_the_definition(name: str, ragged: Rows) -> None:
    (loss,) = ragged.normal(1)
    weight = WEIGHTS[name](ragged.mask.double(), ragged.row, tree_of_tokens(ragged), totals_of(ragged))
    losses = [loss[learnt].tolist() for learnt in ragged.learnt]
    prompts = [losses[n : n + 2] for n in range(0, len(losses), 2)]
    assert (weight * loss).sum().item() == pytest.approx(reference(name, losses, prompts), rel=1e-9, abs=1e-12)
    assert weight[~ragged.mask].eq(0).all()


@pytest.mark.parametrize("name", WEIGHTS)
@given(rows(max_rows=6), st.integers(0, 3))
def test_parts_of_a_step_weigh_what_they_weigh_in_the_whole(name: str, ragged: Rows, cut: int) -> None:
    mask, row, tree, totals = ragged.mask, ragged.row, tree_of_tokens(ragged), totals_of(ragged)
    whole = WEIGHTS[name](mask, row, tree, totals)
    edge = sum(len(m) for m in ragged.masks[: 2 * cut])
    parts = [
        WEIGHTS[name](mask[piece], row[piece] - (row[piece].min() if len(row[piece]) else 0), tree[piece], totals)
        for piece in (slice(0, edge), slice(edge, None))
    ]
    assert torch.cat(parts).tolist() == whole.tolist()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_step_without_learnt_tokens_weighs_nothing(name: str) -> None:
    mask, row = torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    assert WEIGHTS[name](mask, row, row, {"tokens": 0, "rows": 0, "prompts": 0}).tolist() == [0, 0, 0]


def test_fractional_weights_scale_their_token_and_count_as_one() -> None:
    mask, row = torch.tensor([0.5, 0.0, 1.0, 2.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    assert losses.token_mean(mask, 3).tolist() == pytest.approx([0.5 / 3, 0, 1 / 3, 2 / 3])
    assert losses.seq_mean_token_mean(mask, row, 2).tolist() == [0.125, 0, 0.25, 1.0]


@pytest.mark.parametrize(
    ("mask", "expected"), [(torch.bool, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.float32)]
)
def test_weights_have_the_masks_dtype_if_it_is_floating(mask: torch.dtype, expected: torch.dtype) -> None:
    for weigh in WEIGHTS.values():
        one = torch.zeros(2, dtype=torch.int64)
        assert weigh(torch.ones(2).to(mask), one, one, {"tokens": 2, "rows": 1, "prompts": 1}).dtype == expected
