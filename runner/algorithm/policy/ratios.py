"""Importance ratios of a policy to the one before the update, r = exp(l − o).

Legend: T tokens. l = logprobs of the policy, o = logprobs of the policy that the step began with, both float [T].

Every log-ratio that is exponentiated is clamped to ±20 first, as verl and OpenRLHF do (TRL and NeMo-RL do not):
exp(20) = 4.9e8 is finite in every dtype but float16. Beyond the clamp a token has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.algorithm.policy.segments import sum_within

LOG_RATIO_LIMIT = 20.0


def clamped(log_ratio: Tensor) -> Tensor:
    """The log-ratio within ±LOG_RATIO_LIMIT."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """exp(l − o) per token, [T]; differentiable in l."""
    return clamped(logprobs - old).exp()


def sequence_ratio(logprobs: Tensor, old: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """The row's ratio s = exp(mean over its learnt tokens of l − o), at each of its tokens, [T]  (GSPO, 2507.18071).

    mask: bool [T], the learnt tokens; row: int64 [T].

    In the paper's GSPO-token form, sg(s)·exp(l − sg(l)): every token has the value s and the gradient s with respect to
    its own l. Averaged over the row's tokens this is the gradient of s itself, so the aggregation must be
    seq-mean-token-mean. The clamp acts on the row's mean.
    """
    constant = logprobs.detach()
    difference = torch.where(mask, constant - old, 0)
    count = sum_within(mask.to(logprobs.dtype), row).clamp(min=1)
    return clamped(sum_within(difference, row) / count + logprobs - constant).exp()
