"""Advantages of whole samples: how much better a reward is than what one could expect.

    rewards [N], group [N] ──▶ advantages [N] ──[row of each token]──▶ per token ──whiten (`moments`)

    name             advantage                                          paper
    group_mean_std   (R − mean of its group) / (std of its group + eps)   GRPO 2402.03300
    group_mean       R − mean of its group                                Dr. GRPO 2503.20783; REINFORCE++-baseline
    leave_one_out    R − mean of the others of its group                  RLOO 2402.14740
    batch_std        (R − mean of its group) / (std of the batch + eps)   2508.08221; TRL scale_rewards="batch"
    opo              R − length-weighted mean of its group                OPO 2505.23585
    no_baseline      R                                                    REINFORCE

Legend: N samples; rewards float [N] and group int64 [N] (any ids, equal for the samples of one prompt). Results have
the rewards' dtype. The order of the samples does not matter.

*Unscored*: a reward NaN means "could not be scored". It enters no mean, no deviation and no count, and its advantage is
0. A row that is no sample (a shared prompt) carries NaN as well.

*No signal*: where the scored rewards of a group are all equal, or there is only one, every advantage relative to the
group is exactly 0, without rounding. (For a group of one verl keeps the raw reward, NeMo-RL gives 0, OpenRLHF refuses.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.algorithm.policy.moments import mean_and_variance
from runner.algorithm.policy.segments import min_within, sum_within


def group_mean_std(rewards: Tensor, group: Tensor, *, eps: float) -> Tensor:
    """(R − mean) / (std + eps) with the sample's standard deviation (ddof 1), [N].

    verl, TRL and OpenRLHF agree on ddof 1; eps ≥ 0 is 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF.
    """
    centred, count = _centred(rewards, group)
    std = (sum_within(centred.square(), group) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(std > 0, centred / (std + eps), 0)


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """R − mean, [N]. Dr. GRPO also wants the aggregation seq_mean_token_sum_norm."""
    return _centred(rewards, group)[0]


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """R − mean of the other scored samples = n/(n − 1)·(R − mean), [N]; 0 where there is no other."""
    centred, count = _centred(rewards, group)
    return centred * count / (count - 1).clamp(min=1)


def batch_std(rewards: Tensor, group: Tensor, *, eps: float) -> Tensor:
    """(R − mean of the group) / (std of all scored rewards + eps), [N]; the std has ddof 1; eps > 0, 1e-4 in TRL."""
    _, variance = mean_and_variance(rewards, ~rewards.isnan(), ddof=1)
    return group_mean(rewards, group) / (variance.sqrt() + eps)


def opo(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """R − Σ length·R / Σ length over the group, [N]; lengths [N] in learnt tokens, each above 0 where scored."""
    shifted, scored = _shifted(rewards, group)
    weight = torch.where(scored, lengths, 0).to(rewards.dtype)
    total = sum_within(weight, group)
    baseline = sum_within(weight * shifted, group) / torch.where(total > 0, total, 1)
    return torch.where(scored, shifted - baseline, 0)


def no_baseline(rewards: Tensor) -> Tensor:
    """R, and 0 where unscored, [N]."""
    return torch.where(rewards.isnan(), 0, rewards)


def _centred(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(R − mean of the group, 0 where unscored; scored samples of the group), both [N]."""
    shifted, scored = _shifted(rewards, group)
    count = sum_within(scored.to(rewards.dtype), group)
    mean = sum_within(shifted, group) / count.clamp(min=1)
    return torch.where(scored, shifted - mean, 0), count


def _shifted(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(R − smallest of the group, 0 where unscored; whether scored), both [N]. Makes equal rewards exactly 0."""
    scored = ~rewards.isnan()
    smallest = min_within(torch.where(scored, rewards, torch.inf), group)
    return torch.where(scored, rewards - smallest, 0), scored
