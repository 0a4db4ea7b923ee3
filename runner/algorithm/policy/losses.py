"""Losses per token of a policy, a value function and entropy; and the weights that aggregate them.

    logprobs, old ──token_ratio | sequence_ratio──▶ ratio ─┐
                                          advantages ──────┴─loss──▶ per token [T] ──Σ weight·──▶ the step's loss

Legend: T tokens; l = logprobs of the policy; r = the ratio to the policy before the update, of the token or of its row
(`runner.algorithm.policy.importance`, which clamps its logarithm to ±20); A = advantages, without gradient; all float
[T].

Every policy loss returns (loss [T], diagnostics): the bool masks [T] `clip_frac_low`, `clip_frac_high`,
`clip_frac_dual`, true where a bound took effect; one that a loss does not have is left out.

An aggregation gives weights w such that the step's loss is Σ w·loss, over all tokens of all ranks. `mask` [T] is 0 or
False where nothing is trained; a fractional value scales its token and counts as one. Weights have the mask's dtype
where that is floating, else torch's default. `tokens`, `rows` and `groups` (prompts) count those with a trained token
over the whole optimizer step and all ranks (0 gives weights of 0): the weights carry the global denominator and nothing
divides later. Hence a sum of parts is the loss of the whole, however rows are cut into micro-batches or spread over
ranks, as long as no row (for `prompt_mean`, no prompt) is cut. The mean over the tokens of a micro-batch (TRL "bnpo")
depends on the cut and is not offered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.algorithm.policy.advantages import segment_sum
from runner.interfaces.losses import aggregation, policy_loss, torch

if TYPE_CHECKING:
    from torch import Tensor

Diagnostics = dict[str, "Tensor"]
ClipLow = Annotated[float, Field(ge=0, description="Lower clip range")]
ClipHigh = Annotated[float, Field(ge=0, description="Upper clip range")]
DualClip = Annotated[
    float | None, Field(gt=1, description="Bound on the loss of negative advantages (dual clip); null = none")
]


@policy_loss(
    "clip",
    paper="PPO 1707.06347; clip-higher: DAPO 2503.14476; dual clip: 1912.09729; GSPO 2507.18071 with sequence ratio",
    formula="max(−r·A, −clip(r, 1 − clip_low, 1 + clip_high)·A), where A < 0 at most −dual_clip·A",
)
def ppo_clip(
    ratio: Tensor, advantages: Tensor, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, dual_clip: DualClip = None
) -> tuple[Tensor, Diagnostics]:
    """max(−r·A, −clip(r, 1 − clip_low, 1 + clip_high)·A); where A < 0 at most −dual_clip·A, [T].

    clip_low, clip_high: 0.2 and 0.2 in PPO, 0.2 and 0.28 in DAPO, 3e-4 and 4e-4 in GSPO (on sequence ratios).
    dual_clip: above 1, or None for no bound. verl's default is 3; OpenRLHF, NeMo-RL and slime have none.
    A clipped token has no gradient: below 1 − clip_low that takes A < 0, above 1 + clip_high A > 0.
    """
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    below = (ratio < 1 - clip_low) & (advantages < 0)
    above = (ratio > 1 + clip_high) & (advantages > 0)
    clipped = {"clip_frac_low": below, "clip_frac_high": above}
    if dual_clip is None:
        return loss, clipped
    beyond = (ratio > dual_clip) & (advantages < 0)
    return torch.where(beyond, -dual_clip * advantages, loss), {**clipped, "clip_frac_dual": beyond}


@policy_loss("cispo", paper="CISPO 2506.13585", formula="−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·log π")
def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: ClipLow = 1.0, clip_high: ClipHigh = 4.0
) -> tuple[Tensor, Diagnostics]:
    """−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·l, [T]: bounded weights, and every token has a gradient.

    The bounds are relative to 1, as in verl, slime and SkyRL (TRL's is the largest r itself). clip_low = 1 means no
    lower bound, as in the paper.
    """
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    clipped = {"clip_frac_low": ratio < 1 - clip_low, "clip_frac_high": ratio > 1 + clip_high}
    return -weight * advantages * logprobs, clipped


@policy_loss(
    "sapo",
    paper="SAPO 2511.20347",
    formula="−A·(4/τ)·sigmoid(τ·(r − 1)), τ = tau_positive where A > 0, else tau_negative",
)
def sapo(
    ratio: Tensor,
    advantages: Tensor,
    *,
    tau_positive: Annotated[float, Field(gt=0, description="SAPO's temperature for A > 0")] = 1.0,
    tau_negative: Annotated[float, Field(gt=0, description="SAPO's temperature for A ≤ 0")] = 1.05,
) -> tuple[Tensor, Diagnostics]:
    """−A·(4/τ)·sigmoid(τ·(r − 1)), τ = tau_positive where A > 0 and tau_negative elsewhere, [T].

    A soft gate instead of a clip: the gradient at r = 1 is PPO's and fades on both sides, so nothing counts as clipped.
    """
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), {}


@policy_loss("reinforce", paper="REINFORCE (Williams, 1992)", formula="−A·log π")
def reinforce(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Diagnostics]:
    """−A·l, [T]; the ratio is only reported."""
    return -advantages * logprobs, {}


def clipped_value_loss(
    values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Diagnostics]:
    """½·max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²), [T], and {"clipped": bool [T]}.

    values, old, returns: float [T]; old and returns without gradient. clip: above 0, or None for ½·(V − R)².
    The factor ½ is kept by all implementations.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, {"clipped": torch.zeros_like(values, dtype=torch.bool)}
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, {"clipped": (bounded > plain).detach()}


def entropy_bonus(entropy: Tensor, coefficient: float) -> Tensor:
    """−coefficient·H, [T]: lowers the loss of an undecided policy."""
    return -coefficient * entropy


AggregationLength = Annotated[
    float | None,
    Field(
        gt=0,
        description="Divisor of seq_mean_token_sum_norm in tokens; null = sampler.max_new_tokens × turns of an episode",
    ),
]


@aggregation("token_mean", paper="DAPO 2503.14476; TRL: dapo", formula="1 / (trained tokens of the mini-batch)")
def token_mean(mask: Tensor, tokens: int) -> Tensor:
    """1 / tokens, [T]: every token weighs the same."""
    return _as_float(mask) / max(tokens, 1)


@aggregation(
    "seq_mean_token_mean",
    paper="GRPO 2402.03300; GSPO 2507.18071; TRL: grpo",
    formula="1 / (trained tokens of the completion × completions of the mini-batch)",
)
def seq_mean_token_mean(mask: Tensor, row: Tensor, rows: int) -> Tensor:
    """1 / (trained tokens of the row · rows), [T]: every row weighs the same. row: int64 [T]."""
    return _segment_mean_weights(mask, row) / max(rows, 1)


@aggregation("seq_mean_token_sum", paper="RLOO 2402.14740", formula="1 / (completions of the mini-batch)")
def seq_mean_token_sum(mask: Tensor, rows: int) -> Tensor:
    """1 / rows, [T]: a row weighs as much as it is long."""
    return _as_float(mask) / max(rows, 1)


@aggregation(
    "seq_mean_token_sum_norm",
    paper="Dr. GRPO 2503.20783; TRL: dr_grpo",
    formula="1 / (completions of the mini-batch × loss_norm_length)",
)
def seq_mean_token_sum_norm(
    mask: Tensor, rows: int, max_length: float, *, loss_norm_length: AggregationLength = None
) -> Tensor:
    """1 / (rows · loss_norm_length), [T]; null stands for max_length, the maximum length of an answer."""
    return seq_mean_token_sum(mask, rows) / (max_length if loss_norm_length is None else loss_norm_length)


@aggregation(
    "prompt_mean", paper="SkyRL", formula="1 / (trained tokens of the prompt's completions × prompts of the mini-batch)"
)
def prompt_mean(mask: Tensor, group: Tensor, groups: int) -> Tensor:
    """1 / (trained tokens of the prompt · prompts), [T]: all prompts weigh the same. group: int64 [T]."""
    return _segment_mean_weights(mask, group) / max(groups, 1)


def _segment_mean_weights(mask: Tensor, ids: Tensor) -> Tensor:
    return _as_float(mask) / segment_sum((mask != 0).long(), ids).clamp(min=1)


def _as_float(mask: Tensor) -> Tensor:
    return mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())
