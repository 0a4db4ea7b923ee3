"""Estimates of KL(policy ‖ reference) per token, from the log-probability of the sampled token only.

Legend: T tokens; d = l − f; l = logprobs of the policy, f = logprobs of the reference, both float [T].
Source: J. Schulman, "Approximating KL divergence" (2020); as losses: 2506.09477, 2512.21852.

    estimator   value               gradient in l, used as a loss
    k1          d                   1: zero in expectation, so useless as a loss; belongs in the reward
    k2          d²/2                d: that of the reverse KL on on-policy samples
    k3          exp(−d) − 1 + d     1 − exp(−d): biased, at most 1, without a lower bound
    k3_ratio    r·k3                d at r = 1: unbiased also off-policy
    k3_plus     k3                  d: value of k3, gradient of k2

Clamp: where d is exponentiated (k3 and its kin) it is clamped to ±20 in the whole formula, which is finite then; beyond
it k3 has no gradient. No value is clamped. (verl also clamps the value of k3 to ±10, OpenRLHF every estimator, slime
only k3; TRL clamps nothing.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.algorithm.policy.ratios import clamped


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d, [T]; unbiased, of either sign ("kl" in verl)."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d²/2, [T] ("mse")."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(−d) − 1 + d, [T]; unbiased and never negative ("low_var_kl"; GRPO, 2402.03300)."""
    difference = clamped(logprobs - reference)
    return torch.expm1(-difference) + difference


def k3_ratio(logprobs: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    """r·k3, [T]; `ratio` is `token_ratio` and carries gradient (DeepSeek-V3.2, 2512.02556; default in TRL, NeMo-RL)."""
    return ratio * k3(logprobs, reference)


def k3_plus(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2, [T] ("k3+", "low_var_kl+" in verl)."""
    straight_through = k2(logprobs, reference)
    return k3(logprobs, reference).detach() + straight_through - straight_through.detach()
