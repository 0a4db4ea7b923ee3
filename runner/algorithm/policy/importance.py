"""Importance ratios, corrections of the sampler's mismatch, KL estimators and the KL coefficient.

    logprobs, old ──token_ratio | sequence_ratio──▶ r = exp(l − o) [T]                      of the policy loss
    old, sampled ──behaviour_log_ratio──▶ log rho [T] ──correction──▶ weights [T], times the policy loss

Legend: T tokens; l = logprobs of the policy; o = old = the trainer's logprobs under the policy that the step began
with; mu = sampled = those that the sampler reported, at its temperature and before truncation (or the ratio would be
that of two supports, and below 1 before any update); rho = exp(o − mu); f = logprobs of the reference; d = l − f; all
float [T]; mask bool [T] are the trained tokens; row int64 [T].

Weights are constants: without gradient. A policy loss whose ratio is taken to mu itself (o := mu) has this correction
in it and must not be weighted again. Outside the mask rho is 1.

Estimates of KL(policy ‖ reference) per token: J. Schulman, "Approximating KL divergence" (2020); as losses: 2506.09477,
2512.21852.

    estimator   gradient in l, used as a loss
    k1          1: zero in expectation, so useless as a loss; belongs in the reward
    k2          d: that of the reverse KL on on-policy samples
    k3          1 − exp(−d): biased, at most 1, without a lower bound
    k3_ratio    d at r = 1: unbiased also off-policy
    k3_plus     d: value of k3, gradient of k2

Every log-ratio that is exponentiated, d in k3 and its variants too, is clamped first, to ±20 unless told otherwise
(`max_log_ratio`), as verl and OpenRLHF do (TRL and NeMo-RL do not): exp(20) = 4.9e8 is finite in every dtype but
float16. Beyond the clamp a token has no gradient. No estimate is clamped. (verl also clamps the value of k3 to ±10,
OpenRLHF every estimator, slime only k3; TRL none.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from runner.algorithm.policy.advantages import segment_sum
from runner.interfaces.losses import ImportanceWeights, correction, kl_estimator, torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0


def clamp_log_ratio(log_ratio: Tensor, max_log_ratio: float | None) -> Tensor:
    """The log-ratio within ±max_log_ratio; None = as it is."""
    return log_ratio if max_log_ratio is None else log_ratio.clamp(-max_log_ratio, max_log_ratio)


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
    """
    mask = mask & ~sampled.isnan()
    count = mask.sum()
    logprobs = torch.where(mask, old - sampled, 0).abs().sum()
    probabilities = torch.where(mask, old.exp() - sampled.exp(), 0).abs().sum()
    return {"logprob_diff": (logprobs, count), "prob_diff": (probabilities, count)}


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


HORIZON = 10_000  # samples over which the coefficient may change by about a factor e^0.2


@kl_estimator("k1", paper="Schulman 2020", formula="d", kl_in="reward")
def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d, [T]; unbiased, of either sign ("kl" in verl)."""
    return logprobs - reference_logprobs


@kl_estimator("k2", paper="Schulman 2020", formula="d²/2")
def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d²/2, [T] ("mse")."""
    return (logprobs - reference_logprobs).square() / 2


@kl_estimator("k3", paper="Schulman 2020; GRPO 2402.03300", formula="exp(−d) − 1 + d")
def k3(logprobs: Tensor, reference_logprobs: Tensor, max_log_ratio: float | None = MAX_LOG_RATIO) -> Tensor:
    """exp(−d) − 1 + d, [T]; unbiased and never negative ("low_var_kl"; GRPO, 2402.03300)."""
    difference = clamp_log_ratio(logprobs - reference_logprobs, max_log_ratio)
    return torch.expm1(-difference) + difference


@kl_estimator("k3_ratio", paper="DeepSeek-V3.2 2512.02556", formula="r·(exp(−d) − 1 + d)")
def k3_ratio(
    logprobs: Tensor, reference_logprobs: Tensor, ratio: Tensor, max_log_ratio: float | None = MAX_LOG_RATIO
) -> Tensor:
    """r·k3, [T]; `ratio` is `token_ratio` with gradient (DeepSeek-V3.2, 2512.02556; TRL's default)."""
    return ratio * k3(logprobs, reference_logprobs, max_log_ratio)


@kl_estimator("k3_plus", paper="k3+ of verl; 2506.09477", formula="exp(−d) − 1 + d, with the gradient of d²/2")
def k3_plus(logprobs: Tensor, reference_logprobs: Tensor, max_log_ratio: float | None = MAX_LOG_RATIO) -> Tensor:
    """The value of k3 with the gradient of k2, [T] ("k3+", "low_var_kl+" in verl)."""
    straight_through = k2(logprobs, reference_logprobs)
    value = k3(logprobs, reference_logprobs, max_log_ratio).detach()
    return value + straight_through - straight_through.detach()


@dataclass(slots=True)
class KlController:
    """Coefficient of the KL penalty (Ziegler et al., 1909.08593, section 2.2).

    coefficient ← coefficient·(1 + clip(kl/target − 1, ±0.2)·samples/HORIZON); fixed without a target.
    """

    coefficient: float
    target: float | None

    def observe(self, kl: float, samples: int) -> None:
        """Take in the mean KL per token of a step that trained on so many samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * samples / HORIZON
