"""Estimates of KL(policy ‖ reference) per token, and the coefficient of its penalty: fixed, or adapted to a target.

Legend: T tokens; d = l − f; l = logprobs of the policy, f = logprobs of the reference at the sampled token, float [T].
Source: J. Schulman, "Approximating KL divergence" (2020); as losses: 2506.09477, 2512.21852.

    estimator   gradient in l, used as a loss
    k1          1: zero in expectation, so useless as a loss; belongs in the reward
    k2          d: that of the reverse KL on on-policy samples
    k3          1 − exp(−d): biased, at most 1, without a lower bound
    k3_ratio    d at r = 1: unbiased also off-policy
    k3_plus     d: value of k3, gradient of k2

Clamp: where d is exponentiated (k3 and its kin) it is clamped to ±20 in the whole formula, which is finite then; beyond
it k3 has no gradient. No value is clamped. (verl also clamps the value of k3 to ±10, OpenRLHF every estimator, slime
only k3; TRL clamps nothing.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.algorithm.policy.importance import clamped
from runner.interfaces.losses import kl_estimator, torch

if TYPE_CHECKING:
    from torch import Tensor

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
def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(−d) − 1 + d, [T]; unbiased and never negative ("low_var_kl"; GRPO, 2402.03300)."""
    difference = clamped(logprobs - reference_logprobs)
    return torch.expm1(-difference) + difference


@kl_estimator("k3_ratio", paper="DeepSeek-V3.2 2512.02556", formula="r·(exp(−d) − 1 + d)")
def k3_ratio(logprobs: Tensor, reference_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """r·k3, [T]; `ratio` is `token_ratio` and carries gradient (DeepSeek-V3.2, 2512.02556; default in TRL, NeMo-RL)."""
    return ratio * k3(logprobs, reference_logprobs)


@kl_estimator("k3_plus", paper="k3+ of verl; 2506.09477", formula="exp(−d) − 1 + d, with the gradient of d²/2")
def k3_plus(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2, [T] ("k3+", "low_var_kl+" in verl)."""
    straight_through = k2(logprobs, reference_logprobs)
    return k3(logprobs, reference_logprobs).detach() + straight_through - straight_through.detach()


@dataclass(slots=True)
class KlControl:
    """Coefficient of the KL penalty (Ziegler et al., 1909.08593, section 2.2).

    coefficient ← coefficient·(1 + clip(kl/target − 1, ±0.2)·samples/HORIZON); fixed without a target.
    """

    coefficient: float
    target: float | None

    def observe(self, kl: float, samples: int) -> None:
        """Take in the mean KL per token of a step that learnt from so many samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * samples / HORIZON
