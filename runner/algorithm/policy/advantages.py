"""Advantages: how much better a sample, or a token, is than what one could expect.

    rewards [N], group [N] ──▶ of whole samples [N] ──[row of each token]──▶ [T]
    reward [N], KL [T] ──token_level_rewards──▶ [T] ──┬─discounted_returns──▶ [T] ──whiten──▶ [T]      REINFORCE++
                                                └─gae (values [T])────▶ advantages, returns [T]  PPO

Legend: N samples, T tokens; rewards float [N] and group int64 [N] (any ids, equal for the samples of one prompt); `row`
int64 [T] is the row of each token (0..N−1); `mask` bool [T] are the trained tokens: the policy's own actions; values[t]
= V(state before ids[t]); the reward at t is received after ids[t]. The order of the samples does not matter.

*Unscored*: a reward NaN means "could not be scored". It enters no mean, no deviation and no count, and its advantage is
0. A row that is no sample (a shared prompt) carries NaN as well.

*No signal*: where the scored rewards of a group are all equal, or there is only one, every advantage relative to the
group is exactly 0, without rounding. (For a group of one verl keeps the raw reward, NeMo-RL gives 0, OpenRLHF refuses.)

*Masked gaps*. What comes after an action is the next trained token of its row, over whatever a tool or an environment
wrote between them, and nothing (value 0) after the last. Time advances by one per action. Values and rewards on tokens
outside the mask are never read, and results there are 0. (verl and NeMo-RL do so too; OpenRLHF and SkyRL let a gap cut
the recursion. On a mask without gaps all agree.)

What they are made of are sums, smallest values and successors within segments of equal ids (the row of a token, the
group of a sample), mean, variance and whitening under a mask; without a loop and without a read-back from the device:

    ids     7  7  3  7  3          compact_ids  1  1  0  1  0
    values  1  2  3  4  5          segment_sum  7  7  8  7  8        every value meets the sum of its own segment
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.interfaces.losses import advantage, torch

if TYPE_CHECKING:
    from torch import Tensor


def compact_ids(ids: Tensor) -> Tensor:
    """Ids int64 [K] → int64 [K] without gaps: equal where they are equal, 0, 1, … in the order of ids."""
    ordered, order = torch.sort(ids)
    numbers = torch.zeros_like(ids)
    numbers[order[1:]] = torch.cumsum(ordered[1:] != ordered[:-1], 0)
    return numbers


def segment_sum(values: Tensor, ids: Tensor) -> Tensor:
    """Values [K], ids int64 [K] → [K]: each segment's sum, at its members. Differentiable."""
    numbers = compact_ids(ids)
    return torch.zeros_like(values).index_add(0, numbers, values)[numbers]


def segment_min(values: Tensor, ids: Tensor) -> Tensor:
    """Values [K], ids int64 [K] → [K]: each segment's smallest value, at each of its members."""
    numbers = compact_ids(ids)
    return torch.zeros_like(values).scatter_reduce(0, numbers, values, "amin", include_self=False)[numbers]


def next_in_segment(mask: Tensor, ids: Tensor) -> Tensor:
    """Mask bool [K], ids int64 [K] → int64 [K]: the next member of the segment that is in the mask.

    K where there is none. A segment's members must lie in one run, as a row's tokens do.
    """
    size = len(ids)
    marked = torch.where(mask, torch.arange(size, device=ids.device), size)
    later = torch.cat([marked[1:], marked.new_full((1,), size)])[:size]
    nearest = later.flip(0).cummin(0).values.flip(0)
    same = ids[nearest.clamp(max=size - 1)] == ids if size else mask
    return torch.where(same, nearest, size)


def masked_mean_and_variance(values: Tensor, mask: Tensor, *, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and variance under a mask, both 0-d. ddof 0: population variance; 1: Bessel's correction.

    Of `ddof` or fewer values the variance is 0, and so is the mean of none.
    """
    count = mask.sum()
    mean = torch.where(mask, values, 0).sum() / count.clamp(min=1)
    return mean, torch.where(mask, values - mean, 0).square().sum() / (count - ddof).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, ddof: int = 0, eps: float = 1e-8) -> Tensor:
    """(x − mean) / √(variance + eps) in the mask and 0 outside it, [K].

    ddof: 0 is the population's variance (OpenRLHF, NeMo-RL); 1 is Bessel's correction (verl).

    Departure: OpenRLHF and NeMo-RL raise a variance below 1e-8 to it, here as in verl 1e-8 is added to every variance.
    Equal values, and a single one, become 0.
    """
    mean, variance = masked_mean_and_variance(values, mask, ddof=ddof)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + eps), 0)


AdvantageEps = Annotated[float, Field(ge=0, description="Added to the standard deviation of the rewards")]
WhitenDdof = Annotated[
    int, Field(ge=0, le=1, description="Degrees of freedom that the variance of whitening subtracts: 1 = Bessel")
]


@advantage(
    "group_mean_std",
    paper="GRPO 2402.03300",
    formula="(R − mean of the group) / (standard deviation of the group + advantage_eps)",
)
def group_mean_std(rewards: Tensor, group: Tensor, *, advantage_eps: AdvantageEps = 1e-6) -> Tensor:
    """(R − mean) / (std + advantage_eps) with the sample's standard deviation (ddof 1), [N].

    verl, TRL and OpenRLHF agree on ddof 1; advantage_eps is 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF.
    """
    centered, count = _center_by_group(rewards, group)
    std = (segment_sum(centered.square(), group) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(std > 0, centered / (std + advantage_eps), 0)


@advantage("group_mean", paper="Dr. GRPO 2503.20783", formula="R − mean of the group")
def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """R − mean, [N]. Dr. GRPO also needs the aggregation seq_mean_token_sum_norm."""
    return _center_by_group(rewards, group)[0]


@advantage("leave_one_out", paper="RLOO 2402.14740", formula="R − mean of the group's other completions")
def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """R − mean of the other scored samples = n/(n − 1)·(R − mean), [N]; 0 where there is no other."""
    centered, count = _center_by_group(rewards, group)
    return centered * count / (count - 1).clamp(min=1)


@advantage(
    "batch_std",
    paper="2508.08221; TRL: scale_rewards=batch",
    formula="(R − mean of the group) / (standard deviation of the step + advantage_eps)",
)
def batch_std(rewards: Tensor, group: Tensor, *, advantage_eps: AdvantageEps = 1e-6) -> Tensor:
    """(R − group mean) / (std of all scored rewards + advantage_eps), [N]; ddof 1; 1e-4 in TRL."""
    _, variance = masked_mean_and_variance(rewards, ~rewards.isnan(), ddof=1)
    return torch.where(variance > 0, group_mean(rewards, group) / (variance.sqrt() + advantage_eps), 0)


@advantage("opo", paper="OPO 2505.23585", formula="R − length-weighted mean of the group")
def opo(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """R − Σ length·R / Σ length over the group, [N].

    lengths: [N], in the policy's own tokens, also of answers left out of the loss; above 0 where scored
    """
    shifted, scored = _shift_by_minimum(rewards, group)
    weight = torch.where(scored, lengths, 0).to(rewards.dtype)
    total = segment_sum(weight, group)
    baseline = segment_sum(weight * shifted, group) / torch.where(total > 0, total, 1)
    return torch.where(scored, shifted - baseline, 0)


@advantage("none", paper="REINFORCE", formula="R")
def no_baseline(rewards: Tensor) -> Tensor:
    """R, and 0 where unscored, [N]."""
    return torch.where(rewards.isnan(), 0, rewards)


@advantage(
    "reinforce_pp",
    paper="REINFORCE++ 2501.03262",
    formula="Σ_k gamma^k r_(t+k), whitened over the step's tokens (whiten_ddof); r = R on the last token",
    per_token=True,
)
def reinforce_pp(
    token_rewards: Tensor,
    mask: Tensor,
    row: Tensor,
    *,
    gamma: Annotated[float, Field(gt=0, le=1, description="Discount per token")] = 1.0,
    whiten_ddof: WhitenDdof = 0,
) -> Tensor:
    """Discounted returns, whitened, [T]; whiten_ddof is 1 in verl, 0 in OpenRLHF and NeMo-RL."""
    return whiten(discounted_returns(token_rewards, mask, row, gamma), mask, ddof=whiten_ddof)


@advantage(
    "reinforce_pp_baseline",
    paper="REINFORCE++-baseline 2501.03262",
    formula="(R − mean of the group), whitened over the step's tokens (whiten_ddof)",
    per_token=True,
)
def reinforce_pp_baseline(
    rewards: Tensor, group: Tensor, mask: Tensor, row: Tensor, *, whiten_ddof: WhitenDdof = 0
) -> Tensor:
    """R − mean of the group, whitened over all trained tokens, [T]: long answers weigh more, as in verl."""
    return whiten(group_mean(rewards, group)[row], mask, ddof=whiten_ddof)


def _center_by_group(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(R − mean of the group, 0 where unscored; scored samples of the group), both [N]."""
    shifted, scored = _shift_by_minimum(rewards, group)
    count = segment_sum(scored.to(rewards.dtype), group)
    mean = segment_sum(shifted, group) / count.clamp(min=1)
    return torch.where(scored, shifted - mean, 0), count


def _shift_by_minimum(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(R − minimum of the group, 0 where unscored; is scored), both [N]. Equal rewards become exactly 0."""
    scored = ~rewards.isnan()
    smallest = segment_min(torch.where(scored, rewards, torch.inf), group)
    return torch.where(scored, rewards - smallest, 0), scored


def has_variance(rewards: Tensor, group: Tensor, rounding: float = 0.0) -> Tensor:
    """Whether at least two scored rewards of the group differ, bool [N], at each of its members.

    rounding: sums of differences up to this one are none
    """
    return segment_sum(_shift_by_minimum(rewards, group)[0], group) > rounding


def scored_mask(mask: Tensor, rewards: Tensor, row: Tensor) -> Tensor:
    """The mask without rows whose reward is NaN (unscored), bool [T]."""
    return mask & ~rewards.isnan()[row]


def kl_penalized_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, row: Tensor, beta: float) -> Tensor:
    """R − beta·Σ KL over the row's tokens in the mask, [N]: the penalty in the reward (RLOO, 2402.14740).

    rewards: float [N], NaN stays NaN; kl: float [T], k1 per token; mask: bool [T], the policy's own tokens.
    """
    return rewards.index_add(0, row, torch.where(mask, kl, 0), alpha=-beta)


def token_level_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, row: Tensor, beta: float) -> Tensor:
    """−beta·KL per trained token, plus the row's reward on the last, [T] (PPO; REINFORCE++ 2501.03262).

    rewards: float [N]; kl: float [T], k1 per token. A row whose reward is NaN has 0 everywhere: take it out of the
    mask with `scored_mask`. A row without trained tokens has no place for its reward.
    """
    last = next_in_segment(mask, row) == len(row)
    placed = torch.where(last, rewards[row], 0) - beta * kl
    return torch.where(scored_mask(mask, rewards, row), placed, 0)


def discounted_returns(rewards: Tensor, mask: Tensor, row: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma·G at the row's next trained token, float [T]; 0 outside the mask."""
    total = _discounted_sum(torch.where(mask, rewards, 0), next_in_segment(mask, row), gamma)
    return torch.where(mask, total, 0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, row: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (1506.02438): advantages, returns, float [T], 0 outside the mask.

        delta_t = r_t + gamma·V_next − V_t       A_t = delta_t + gamma·lam·A_next       return_t = A_t + V_t

    rewards, values: float [T]. Returns are made of the advantages before any whitening, as in every implementation.
    """
    following = next_in_segment(mask, row)
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
