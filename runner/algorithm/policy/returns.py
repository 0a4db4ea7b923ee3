"""What follows a token: rewards placed on tokens, discounted returns, generalised advantages.

    reward [N], KL [T] ──token_rewards──▶ [T] ──┬─discounted_returns──▶ [T] ──whiten──▶ advantages   REINFORCE++
                                                └─gae (values [T])────▶ advantages, returns [T]      PPO

Legend: N rows, T tokens. `row` int64 [T] is the row of each token (0..N−1); `mask` bool [T] are the learnt tokens: the
policy's own actions. values[t] = V(state before ids[t]); the reward at t is received after ids[t].

*Masked gaps*. What comes after an action is the next learnt token of its row, over whatever a tool or an environment
wrote between them, and nothing (value 0) after the last. Time advances by one per action. Values and rewards on tokens
outside the mask are never read, and results there are 0. (verl and NeMo-RL do so too; OpenRLHF and SkyRL let a gap cut
the recursion. On a mask without gaps all agree.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.algorithm.policy.segments import next_within


def scored_tokens(mask: Tensor, rewards: Tensor, row: Tensor) -> Tensor:
    """The mask without the rows whose reward is NaN (unscored), bool [T]: what may be whitened and learnt."""
    return mask & ~rewards.isnan()[row]


def penalised_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, row: Tensor, beta: float) -> Tensor:
    """R − beta·Σ KL over the row's learnt tokens, [N]: the penalty inside a sequence's reward (RLOO, 2402.14740).

    rewards: float [N], NaN stays NaN; kl: float [T], k1 per token.
    """
    return rewards.index_add(0, row, torch.where(mask, kl, 0), alpha=-beta)


def token_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, row: Tensor, beta: float) -> Tensor:
    """−beta·KL on every learnt token, plus the row's reward on its last one, [T] (PPO; REINFORCE++ 2501.03262).

    rewards: float [N]; kl: float [T], k1 per token. A row whose reward is NaN has 0 everywhere: take it out of the
    mask with `scored_tokens`. A row without learnt tokens has no place for its reward.
    """
    last = next_within(mask, row) == len(row)
    placed = torch.where(last, rewards[row], 0) - beta * kl
    return torch.where(scored_tokens(mask, rewards, row), placed, 0)


def discounted_returns(rewards: Tensor, mask: Tensor, row: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma·G at the row's next learnt token, float [T]; 0 outside the mask."""
    total = _discounted_sum(torch.where(mask, rewards, 0), next_within(mask, row), gamma)
    return torch.where(mask, total, 0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, row: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438): (advantages, returns), both float [T] and 0 outside the mask.

        delta_t = r_t + gamma·V_next − V_t       A_t = delta_t + gamma·lam·A_next       return_t = A_t + V_t

    rewards, values: float [T]. Returns are made of the advantages before any whitening, as in every implementation.
    """
    following = next_within(mask, row)
    next_values = torch.cat([values, values.new_zeros(1)])[following]
    delta = torch.where(mask, rewards + gamma * next_values - values, 0)
    advantages = torch.where(mask, _discounted_sum(delta, following, gamma * lam), 0)
    return advantages, torch.where(mask, advantages + values, 0)


def _discounted_sum(values: Tensor, following: Tensor, factor: float) -> Tensor:
    """S_t = x_t + factor·S at following[t], where T means the end; [T].

    By pointer doubling: after k rounds S holds 2^k terms and the pointer leads 2^k tokens ahead, so that log2(T) rounds
    do for rows of any length.
    """
    end = following.new_full((1,), len(following))
    total, ahead = torch.cat([values, values.new_zeros(1)]), torch.cat([following, end])
    for _ in range(len(following).bit_length()):
        total = total + factor * total[ahead]
        ahead, factor = ahead[ahead], factor * factor
    return total[:-1]
