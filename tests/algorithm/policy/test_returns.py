"""Token rewards, returns and generalized advantages against loops over the tokens of each row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm.policy.advantages import (
    discounted_returns,
    gae,
    kl_penalized_rewards,
    scored_mask,
    token_level_rewards,
)
from tests.algorithm.ragged import NAN, Rows, rows

FACTOR = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def gae_by_hand(ragged: Rows, rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Backwards over each row's trained tokens, as if the others were not there."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for learnt in ragged.learnt:
        next_value = advantage = 0.0
        for t in reversed(learnt):
            delta = rewards[t].item() + gamma * next_value - values[t].item()
            advantage = delta + gamma * lam * advantage
            advantages[t], returns[t], next_value = advantage, advantage + values[t].item(), values[t].item()
    return advantages, returns


@given(rows(max_length=20), FACTOR, FACTOR)
def test_gae_is_the_recursion_over_learnt_tokens(ragged: Rows, gamma: float, lam: float) -> None:
    rewards, values = ragged.normal(2)
    got = gae(rewards, values, ragged.mask, ragged.row, gamma=gamma, lam=lam)
    for ours, theirs in zip(got, gae_by_hand(ragged, rewards, values, gamma, lam), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@given(rows(), FACTOR, FACTOR)
def test_gae_never_reads_what_is_not_learnt(ragged: Rows, gamma: float, lam: float) -> None:
    rewards, values = ragged.normal(2)
    spoilt = [torch.where(ragged.mask, x, NAN) for x in (rewards, values)]
    clean = gae(rewards, values, ragged.mask, ragged.row, gamma=gamma, lam=lam)
    for ours, theirs in zip(gae(*spoilt, ragged.mask, ragged.row, gamma=gamma, lam=lam), clean, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_gae_of_a_row_with_a_tool_between_two_turns() -> None:
    """Two actions, a gap of two tool tokens, one action that is rewarded; gamma 0.5, lambda 0.5."""
    mask = torch.tensor([True, True, False, False, True])
    values = torch.tensor([0.5, 1.0, 9.0, 9.0, 2.0], dtype=torch.float64)
    rewards = torch.tensor([0.0, 0, 7.0, 0, 4.0], dtype=torch.float64)
    advantages, returns = gae(rewards, values, mask, torch.zeros(5, dtype=torch.int64), gamma=0.5, lam=0.5)
    # last: 4 − 2 = 2;  before the gap: 0.5·2 − 1 + 0.25·2 = 0.5;  first: 0.5·1 − 0.5 + 0.25·0.5 = 0.125
    assert advantages.tolist() == [0.125, 0.5, 0, 0, 2.0]
    assert returns.tolist() == [0.625, 1.5, 0, 0, 4.0]


@given(rows(), FACTOR, FACTOR)
def test_rows_do_not_see_one_another(ragged: Rows, gamma: float, lam: float) -> None:
    rewards, values = ragged.normal(2)
    whole = gae(rewards, values, ragged.mask, ragged.row, gamma=gamma, lam=lam)[0]
    for span in ragged.spans:
        piece = slice(span.start, span.stop)
        alone = gae(rewards[piece], values[piece], ragged.mask[piece], ragged.row[piece] * 0, gamma=gamma, lam=lam)[0]
        torch.testing.assert_close(whole[piece], alone, rtol=1e-12, atol=1e-12)


@given(rows(max_length=20), FACTOR)
def test_discounted_returns(ragged: Rows, gamma: float) -> None:
    (rewards,) = ragged.normal(1)
    expected = torch.zeros_like(rewards)
    for learnt in ragged.learnt:
        for place, t in enumerate(learnt):
            expected[t] = sum(gamma**k * rewards[u].item() for k, u in enumerate(learnt[place:]))
    got = discounted_returns(rewards, ragged.mask, ragged.row, gamma)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_long_row_keeps_its_precision() -> None:
    size, gamma = 5000, 0.999
    ones, row = torch.ones(size, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    got = discounted_returns(ones, ones.bool(), row, gamma)
    closed = (1 - gamma ** torch.arange(size, 0, -1, dtype=torch.float64)) / (1 - gamma)
    torch.testing.assert_close(got, closed, rtol=1e-11, atol=0)


@given(rows(min_rows=1), st.floats(0, 2), st.integers(0, 31))
def test_place_rewards_place_the_reward_last_and_the_penalty_everywhere(
    ragged: Rows, beta: float, unscored: int
) -> None:
    kl, per_row = ragged.normal(2)
    rewards = torch.cat([per_row, per_row.new_zeros(5)])[: len(ragged.masks)]
    rewards = torch.where(torch.tensor([bool(unscored >> n & 1) for n in range(len(rewards))]), NAN, rewards)
    expected = torch.zeros_like(kl)
    for n, learnt in enumerate(ragged.learnt):
        for t in learnt if not rewards[n].isnan() else []:
            expected[t] = -beta * kl[t] + (rewards[n] if t == learnt[-1] else 0)
    torch.testing.assert_close(token_level_rewards(rewards, kl, ragged.mask, ragged.row, beta), expected)


@given(rows(min_rows=1), st.floats(0, 2))
def test_both_placements_of_the_penalty_agree_on_the_rows_total(ragged: Rows, beta: float) -> None:
    kl, per_row = ragged.normal(2)
    rewards = torch.cat([per_row, per_row.new_zeros(5)])[: len(ragged.masks)]
    inside = kl_penalized_rewards(rewards, kl, ragged.mask, ragged.row, beta)
    placed = discounted_returns(
        token_level_rewards(rewards, kl, ragged.mask, ragged.row, beta), ragged.mask, ragged.row, gamma=1.0
    )
    for n, learnt in enumerate(ragged.learnt):
        expected = placed[learnt[0]] if learnt else rewards[n]
        torch.testing.assert_close(inside[n], expected)


def test_an_unscored_row_stays_unscored_and_leaves_the_mask() -> None:
    rewards, row = torch.tensor([NAN, 1.0]), torch.tensor([0, 0, 1, 1])
    mask, kl = torch.tensor([True, True, False, True]), torch.ones(4)
    assert scored_mask(mask, rewards, row).tolist() == [False, False, False, True]
    assert kl_penalized_rewards(rewards, kl, mask, row, 0.5).isnan().tolist() == [True, False]


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_to_learn(size: int) -> None:
    nothing = torch.zeros(size, dtype=torch.bool)
    row, x = torch.zeros(size, dtype=torch.int64), torch.ones(size)
    assert token_level_rewards(torch.ones(1), x, nothing, row, 0.1).tolist() == [0] * size
    assert [part.tolist() for part in gae(x, x, nothing, row, gamma=1.0, lam=1.0)] == [[0] * size] * 2
