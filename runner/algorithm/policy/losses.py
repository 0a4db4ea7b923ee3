"""Losses per token of a policy, of a value function, and of entropy; `aggregation` makes them one.

    logprobs, old ──token_ratio | sequence_ratio──▶ ratio ─┐
                                          advantages ──────┴─loss──▶ per token [T] ──Σ weight·──▶ the step's loss

    name        loss per token                                   paper
    ppo_clip    max(−r·A, −clip(r, 1 − low, 1 + high)·A)          PPO 1707.06347; clip-higher: DAPO 2503.14476;
                                                                  dual clip: 1912.09729; GSPO 2507.18071 with s for r
    cispo       −sg(clip(r, 1 − low, 1 + high))·A·l               CISPO 2506.13585
    sapo        −A·(4/tau)·sigmoid(tau·(r − 1))                   SAPO 2511.20347
    reinforce   −A·l                                              REINFORCE

Legend: T tokens; l = logprobs of the policy; r = the ratio to the policy before the update, of the token or of its row
(`runner.algorithm.policy.ratios`, which clamps its logarithm to ±20); A = advantages, without gradient; all float [T].

Every policy loss returns (loss [T], diagnostics): `ratio` (detached) and the bool masks `clipped_low`, `clipped_high`,
`clipped_dual` (all [T], the same keys always), true where a bound took effect.
"""

from __future__ import annotations

import torch
from torch import Tensor

Diagnostics = dict[str, Tensor]


def ppo_clip(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None
) -> tuple[Tensor, Diagnostics]:
    """max(−r·A, −clip(r, 1 − low, 1 + high)·A); where A < 0 at most −dual·A, [T].

    low, high: 0.2 and 0.2 in PPO, 0.2 and 0.28 in DAPO, 3e-4 and 4e-4 in GSPO (on sequence ratios).
    dual: above 1, or None for no bound. verl has 3 unless told otherwise; OpenRLHF, NeMo-RL and slime have none.
    A clipped token has no gradient: below 1 − low that takes A < 0, above 1 + high A > 0.
    """
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    below = (ratio < 1 - low) & (advantages < 0)
    above = (ratio > 1 + high) & (advantages > 0)
    if dual is None:
        return loss, _diagnostics(ratio, below, above)
    beyond = (ratio > dual) & (advantages < 0)
    return torch.where(beyond, -dual * advantages, loss), _diagnostics(ratio, below, above, beyond)


def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Diagnostics]:
    """−sg(clip(r, 1 − low, 1 + high))·A·l, [T]: the weight is bounded, and every token keeps its gradient.

    The bounds are relative to 1, as in verl, slime and SkyRL (TRL's is the largest r itself). low = 1 means no lower
    bound, as in the paper.
    """
    weight = ratio.detach().clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs, _diagnostics(ratio, ratio < 1 - low, ratio > 1 + high)


def sapo(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> tuple[Tensor, Diagnostics]:
    """−A·(4/tau)·sigmoid(tau·(r − 1)), tau_positive where A > 0 and tau_negative elsewhere, [T].

    1.0 and 1.05 in the paper. A soft gate instead of a clip: the gradient at r = 1 is PPO's and fades on both sides, so
    nothing counts as clipped.
    """
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    none = torch.zeros_like(advantages, dtype=torch.bool)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), _diagnostics(ratio, none, none)


def reinforce(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Diagnostics]:
    """−A·l, [T]; the ratio is only reported."""
    none = torch.zeros_like(advantages, dtype=torch.bool)
    return -advantages * logprobs, _diagnostics(ratio, none, none)


def value_clip(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Diagnostics]:
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


def _diagnostics(ratio: Tensor, low: Tensor, high: Tensor, dual: Tensor | None = None) -> Diagnostics:
    return {
        "ratio": ratio.detach(),
        "clipped_low": low,
        "clipped_high": high,
        "clipped_dual": torch.zeros_like(low) if dual is None else dual,
    }
