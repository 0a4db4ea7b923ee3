"""KL divergences in nats: estimators of KL(policy ‖ reference) per token; divergences from a teacher.

Estimates of KL(policy ‖ reference) per token: J. Schulman, "Approximating KL divergence" (2020); as losses: 2506.09477,
2512.21852.

    estimator   gradient in l, used as a loss
    k1          1: zero in expectation, so useless as a loss; belongs in the reward
    k2          d: that of the reverse KL on on-policy samples
    k3          1 − exp(−d): biased, at most 1, without a lower bound
    k3_ratio    r·d: unbiased also off-policy
    k3_plus     d: value of k3, gradient of k2

Every log-ratio that is exponentiated, d in k3 and its variants too, is clamped first, to ±20 by default
(`max_log_ratio`), as verl and OpenRLHF do (TRL and NeMo-RL do not): exp(20) = 4.9e8 is finite in every dtype but
float16. Beyond the clamp k3 and a ratio have no gradient; those of k3_ratio and k3_plus hold no exponential of d and
stay as they are. No estimate is clamped. (verl also clamps the value of k3 to ±10, OpenRLHF every estimator, slime only
k3; TRL none.)

Legend: T tokens; l = logprobs of the policy; f = logprobs of the reference; d = l − f; float [T].

Divergences of a student's distributions from its teacher's: as beta goes to 0, jsd / beta goes to the forward KL; as it
goes to 1, jsd / (1 − beta) goes to the reverse KL: near both ends jsd itself, and with it its gradient, vanishes.
S tokens, V events: the vocabulary, or some of it and, as one event, all others. Log-probabilities [S, V] are finite, in
float32 or better; the teacher's are without gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.interfaces.losses import divergence, kl_estimator, torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
HORIZON = 10_000  # samples over which the coefficient may change by about a factor e^0.2


@divergence("forward_kl", paper="Hinton et al. 1503.02531", formula="KL(P ‖ Q)")
def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Σ P·(log P − log Q), [S]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


@divergence("reverse_kl", paper="MiniLLM 2306.08543", formula="KL(Q ‖ P)")
def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Σ Q·(log Q − log P), [S]."""
    return forward_kl(student, teacher)


@divergence("jsd", paper="GKD 2306.13649", formula="beta·KL(P ‖ M) + (1 − beta)·KL(Q ‖ M), M = beta·P + (1 − beta)·Q")
def jsd(
    teacher: Tensor,
    student: Tensor,
    *,
    beta: Annotated[float, Field(gt=0, lt=1, description="Weight of the teacher in the mixture M")] = 0.5,
) -> Tensor:
    """The generalized Jensen-Shannon divergence, [S]."""
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(teacher, mixture) + (1 - beta) * forward_kl(student, mixture)


def clamp_log_ratio(log_ratio: Tensor, max_log_ratio: float | None) -> Tensor:
    """The log-ratio within ±max_log_ratio; None = as it is."""
    return log_ratio if max_log_ratio is None else log_ratio.clamp(-max_log_ratio, max_log_ratio)


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
    """r·k3, [T], with gradient r·d; `ratio` is r = `token_ratio` (DeepSeek-V3.2; TRL's default).

    The gradient r·k3 + r·(1 − exp(−d)) is written out: a clamp would cut only the second term, and leave exp(20).
    """
    value = ratio.detach() * k3(logprobs, reference_logprobs, max_log_ratio).detach()
    return _with_gradient(value, ratio.detach() * k2(logprobs, reference_logprobs))


@kl_estimator("k3_plus", paper="k3+ of verl; 2506.09477", formula="exp(−d) − 1 + d, with the gradient of d²/2")
def k3_plus(logprobs: Tensor, reference_logprobs: Tensor, max_log_ratio: float | None = MAX_LOG_RATIO) -> Tensor:
    """The value of k3 with the gradient of k2, [T] ("k3+", "low_var_kl+" in verl)."""
    return _with_gradient(k3(logprobs, reference_logprobs, max_log_ratio).detach(), k2(logprobs, reference_logprobs))


def _with_gradient(value: Tensor, other: Tensor) -> Tensor:
    """`value`, [T], with the gradient of `other` (straight-through)."""
    return value + (other - other.detach())


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
