"""Importance ratios of a policy, and corrections of the mismatch between sampler and trainer.

    logprobs, old ──token_ratio | sequence_ratio──▶ r = exp(l − o) [T]                      of the policy loss
    old, sampled ──behavior_log_ratio──▶ log rho [T] ──correction──▶ weights [T], times the policy loss

Legend: T tokens; l = logprobs of the policy; o = old = the trainer's logprobs under the policy that the step began
with; mu = sampled = those that the sampler reported, at its temperature and before truncation (or the ratio would be
that of two supports, and below 1 before any update); rho = exp(o − mu); all float [T]; mask bool [T] are the trained
tokens; row int64 [T].

Weights are constants: without gradient. A policy loss whose ratio is taken to mu itself (o := mu) has this correction
in it and must not be weighted again. Outside the mask rho is 1.

Log-ratios are clamped before they are exponentiated (`max_log_ratio`, see `runner.algorithm.kl_divergence`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from runner.algorithm.kl_divergence import MAX_LOG_RATIO, clamp_log_ratio
from runner.algorithm.policy.advantages import segment_sum
from runner.interfaces.losses import ImportanceWeights, correction, torch

if TYPE_CHECKING:
    from torch import Tensor


def token_ratio(logprobs: Tensor, old: Tensor, max_log_ratio: float | None = MAX_LOG_RATIO) -> Tensor:
    """exp(l − o) per token, [T]; differentiable in l."""
    return clamp_log_ratio(logprobs - old, max_log_ratio).exp()


def sequence_ratio(
    logprobs: Tensor, old: Tensor, mask: Tensor, row: Tensor, max_log_ratio: float | None = MAX_LOG_RATIO
) -> Tensor:
    """The row's ratio s = exp(mean over trained tokens of l − o), at each token, [T] (GSPO, 2507.18071).

    mask: bool [T], the trained tokens; row: int64 [T].

    In the paper's GSPO-token form, sg(s)·exp(l − sg(l)): every token has the value s and the gradient s with respect to
    its own l. Averaged over the row's tokens this is the gradient of s itself, so the aggregation must be
    seq-mean-token-mean. The clamp acts on the row's mean.
    """
    constant = logprobs.detach()
    difference = torch.where(mask, constant - old, 0)
    count = segment_sum(mask.to(logprobs.dtype), row).clamp(min=1)
    log_ratio = segment_sum(difference, row) / count + logprobs - constant
    return clamp_log_ratio(log_ratio, max_log_ratio).exp()


Level = Literal["token", "sequence"]


def behavior_log_ratio(
    old: Tensor, sampled: Tensor, mask: Tensor, row: Tensor, level: Level, max_log_ratio: float | None = MAX_LOG_RATIO
) -> Tensor:
    """log rho, detached, [T]; 0 outside the mask.

    token: o − mu.  sequence: Σ (o − mu) over the row's trained tokens, the ratio of whole answers, at each of them.
    """
    difference = torch.where(mask, (old - sampled).detach(), 0)
    if level == "sequence":
        difference = torch.where(mask, segment_sum(difference, row), 0)
    return clamp_log_ratio(difference, max_log_ratio)


High = Annotated[float, Field(ge=1, description="Upper bound of the weights")]
Low = Annotated[float, Field(ge=0, le=1, description="Lower bound of the weights")]


@correction("tis", paper="Yao et al. 2025", formula="min(ρ, correction_max)")
def tis_weights(log_ratio: Tensor, *, correction_max: High = 2.0) -> ImportanceWeights:
    """min(rho, high): 2 per token in verl, slime and SkyRL, 3 in TRL; 5 per sequence in SkyRL.

    Departure: OpenRLHF also raises small weights, to 0.5.
    """
    rho = log_ratio.exp()
    return ImportanceWeights(rho.clamp(max=correction_max), rho > correction_max)


@correction("mis", paper="IcePop 2510.18855", formula="ρ where correction_min ≤ ρ ≤ correction_max, else 0")
def mis_weights(log_ratio: Tensor, *, correction_max: High = 5.0, correction_min: Low = 0.5) -> ImportanceWeights:
    """rho where low ≤ rho ≤ high, else 0: 0.5 and 5 in IcePop, 0 and 3 per sequence in TRL."""
    rho = log_ratio.exp()
    outside = (rho < correction_min) | (rho > correction_max)
    return ImportanceWeights(torch.where(outside, 0, rho), outside)


@correction(
    "decoupled",
    paper="decoupled PPO 2110.00641; AReaL 2505.24298",
    formula="ρ up to correction_max, else 0",
    for_stale=True,
)
def decoupled_weights(log_ratio: Tensor, *, correction_max: High = math.inf) -> ImportanceWeights:
    """rho up to the bound and 0 above it, as AReaL caps it; rho everywhere without one (inf)."""
    return mis_weights(log_ratio, correction_max=correction_max, correction_min=0.0)


def sampler_mismatch(old: Tensor, sampled: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mismatch of sampler and trainer, (sum, count) over trained tokens with known mu; both 0-d.

    logprob_diff: |o − mu|.  prob_diff: |exp(o) − exp(mu)|; fine under 0.005, a fault above 0.01 (verl's FAQ).
    kl: KL(sampler ‖ trainer) in nats, the k3 estimate exp(o − mu) − 1 − (o − mu).
    """
    mask = mask & ~sampled.isnan()
    count = mask.sum()
    log_ratio = torch.where(mask, old - sampled, 0)
    probabilities = torch.where(mask, old.exp() - sampled.exp(), 0).abs().sum()
    return {
        "logprob_diff": (log_ratio.abs().sum(), count),
        "prob_diff": (probabilities, count),
        "kl": ((log_ratio.expm1() - log_ratio).sum(), count),
    }


def affected_counts(found: ImportanceWeights, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(trained tokens whose weight was truncated or masked, trained tokens); both 0-d."""
    return (found.affected & mask).sum(), mask.sum()


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(Σw)² / (n·Σw²), 0-d (Kish): the share of samples that the weighted ones are worth; 1 if equal.

    weights: rho, float [T], of which the mask picks the trained tokens. 0 if there are none.
    """
    kept = torch.where(mask, weights, 0)
    worth = mask.sum() * kept.square().sum()
    return torch.where(worth > 0, kept.sum().square() / torch.where(worth > 0, worth, 1), 0)
