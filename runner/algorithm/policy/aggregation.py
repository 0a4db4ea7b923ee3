"""How per-token losses become one: weights w such that the step's loss is Σ w·loss, over all tokens of all ranks.

    name                      the step's loss                                   in use as
    token_mean                Σ loss / tokens                                   DAPO 2503.14476; TRL "dapo"
    seq_mean_token_mean       mean over rows of (Σ loss / tokens of the row)    GRPO 2402.03300; GSPO; TRL "grpo"
    seq_mean_token_sum        mean over rows of Σ loss                          RLOO 2402.14740
    seq_mean_token_sum_norm   the same / constant                               Dr. GRPO 2503.20783; TRL "dr_grpo"
    prompt_mean               mean over prompts of (Σ loss / its tokens)        SkyRL

Legend: T tokens. `mask` [T] is 0 or False where nothing is learnt; a fractional value scales its token and counts as
one. Weights have the mask's dtype where that is floating, else torch's default. `tokens`, `rows` and `prompts` count
those with a learnt token over the whole optimizer step and all ranks (0 gives weights of 0): the weights carry the
global denominator and nothing divides later. Hence a sum of parts is the loss of the whole, however rows are cut into
micro-batches or spread over ranks, as long as no row (for `prompt_mean`, no prompt) is cut. The mean over the tokens of
a micro-batch (TRL "bnpo") depends on the cut and is not offered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.algorithm.policy.segments import sum_within


def token_mean(mask: Tensor, tokens: int) -> Tensor:
    """1 / tokens, [T]: every token weighs the same."""
    return _floating(mask) / max(tokens, 1)


def seq_mean_token_mean(mask: Tensor, row: Tensor, rows: int) -> Tensor:
    """1 / (learnt tokens of the row · rows), [T]: every row weighs the same. row: int64 [T]."""
    return _mean_within(mask, row) / max(rows, 1)


def seq_mean_token_sum(mask: Tensor, rows: int) -> Tensor:
    """1 / rows, [T]: a row weighs as much as it is long."""
    return _floating(mask) / max(rows, 1)


def seq_mean_token_sum_norm(mask: Tensor, rows: int, constant: float) -> Tensor:
    """1 / (rows · constant), [T]; `constant` > 0 is a length in tokens, usually the longest that may be sampled."""
    return seq_mean_token_sum(mask, rows) / constant


def prompt_mean(mask: Tensor, tree: Tensor, prompts: int) -> Tensor:
    """1 / (learnt tokens of the prompt's samples · prompts), [T]: every prompt weighs the same. tree: int64 [T]."""
    return _mean_within(mask, tree) / max(prompts, 1)


def _mean_within(mask: Tensor, ids: Tensor) -> Tensor:
    return _floating(mask) / sum_within((mask != 0).long(), ids).clamp(min=1)


def _floating(mask: Tensor) -> Tensor:
    return mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())
