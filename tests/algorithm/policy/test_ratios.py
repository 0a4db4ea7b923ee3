"""Importance ratios of tokens and of whole rows: values, clamps and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from runner.algorithm.policy.importance import sequence_ratio, token_ratio
from runner.algorithm.policy.losses import seq_mean_token_mean
from tests.algorithm.ragged import Rows, rows


@given(rows())
def test_the_tokens_ratio_is_the_quotient_of_probabilities(ragged: Rows) -> None:
    logprobs, old = ragged.normal(2)
    expected = [math.exp(a) / math.exp(b) for a, b in zip(logprobs.tolist(), old.tolist(), strict=True)]
    torch.testing.assert_close(token_ratio(logprobs, old), torch.tensor(expected, dtype=torch.float64))


@given(rows())
def test_the_rows_ratio_is_the_geometric_mean_over_its_learnt_tokens(ragged: Rows) -> None:
    logprobs, old = ragged.normal(2)
    got = sequence_ratio(logprobs, old, ragged.mask, ragged.row)
    for span, learnt in zip(ragged.spans, ragged.learnt, strict=True):
        product = math.prod(math.exp(logprobs[t].item() - old[t].item()) for t in learnt)
        mean = product ** (1 / max(len(learnt), 1))
        assert got[list(span)].tolist() == pytest.approx([mean] * len(span), rel=1e-9)


@given(rows(min_rows=1))
def test_the_token_form_has_the_gradient_of_the_broadcast_ratio(ragged: Rows) -> None:
    """GSPO-token under seq-mean-token-mean against s itself, as a differentiable function of the row's mean."""
    logprobs, old, per_row = ragged.normal(3)
    logprobs.requires_grad_()
    mask, row = ragged.mask, ragged.row
    advantages = per_row[row]
    weight = seq_mean_token_mean(mask.double(), row, 3)
    token_form = (weight * advantages * sequence_ratio(logprobs, old, mask, row)).sum()
    broadcast = (
        sum(
            per_row[n] * (logprobs[learnt] - old[learnt]).mean().exp() / 3
            for n, learnt in enumerate(ragged.learnt)
            if learnt
        )
        + 0 * logprobs.sum()
    )
    torch.testing.assert_close(token_form, broadcast)
    ours, theirs = (torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in (token_form, broadcast))
    torch.testing.assert_close(ours, theirs)


def test_each_token_of_a_row_carries_the_rows_ratio_into_its_own_gradient_only() -> None:
    logprobs, old = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5]], dtype=torch.float64)
    mask, row = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    jacobian = torch.autograd.functional.jacobian(lambda x: sequence_ratio(x, old, mask, row), logprobs)
    torch.testing.assert_close(jacobian, math.exp(-0.5 / 3) * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("difference", "ratio"), [(500.0, math.exp(20)), (-500.0, math.exp(-20))])
def test_extreme_ratios_are_finite_and_without_gradient(level: str, difference: float, ratio: float) -> None:
    old = torch.zeros(2)
    logprobs = torch.full((2,), difference, requires_grad=True)
    mask, row = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    got = token_ratio(logprobs, old) if level == "token" else sequence_ratio(logprobs, old, mask, row)
    got.sum().backward()
    torch.testing.assert_close(got, torch.full((2,), ratio))
    assert logprobs.grad.tolist() == [0, 0]


def test_a_token_that_is_not_learnt_does_not_move_its_row() -> None:
    logprobs = torch.tensor([0.5, float("-inf"), 0.5], dtype=torch.float64)
    old = torch.tensor([0.0, float("-inf"), 1.0], dtype=torch.float64)
    mask, row = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.int64)
    assert sequence_ratio(logprobs, old, mask, row)[mask].tolist() == [1.0, 1.0]
