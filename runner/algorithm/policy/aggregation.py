"""How per-token losses become one: weights w such that the step's loss is Σ w·loss, over all tokens of all ranks.

Legend: T tokens. `mask` [T] is 0 or False where nothing is learnt; a fractional value scales its token and counts as
one. Weights have the mask's dtype where that is floating, else torch's default. `tokens`, `rows` and `groups`
(prompts) count those with a learnt token over the whole optimizer step and all ranks (0 gives weights of 0): the
weights carry the global denominator and nothing divides later. Hence a sum of parts is the loss of the whole, however
rows are cut into micro-batches or spread over ranks, as long as no row (for `prompt_mean`, no prompt) is cut. The
mean over the tokens of a micro-batch (TRL "bnpo") depends on the cut and is not offered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.algorithm.policy.segments import sum_within
from runner.interfaces.losses import aggregation, torch

if TYPE_CHECKING:
    from torch import Tensor

AggregationLength = Annotated[
    float | None,
    Field(
        gt=0,
        description="Constant of seq_mean_token_sum_norm in tokens; null = sampler.max_new_tokens × the turns of an "
        "episode",
    ),
]


@aggregation("token_mean", paper="DAPO 2503.14476; TRL: dapo", formula="1 / (trained tokens of the step)")
def token_mean(mask: Tensor, tokens: int) -> Tensor:
    """1 / tokens, [T]: every token weighs the same."""
    return _floating(mask) / max(tokens, 1)


@aggregation(
    "seq_mean_token_mean",
    paper="GRPO 2402.03300; GSPO 2507.18071; TRL: grpo",
    formula="1 / (trained tokens of the answer × answers of the step)",
)
def seq_mean_token_mean(mask: Tensor, row: Tensor, rows: int) -> Tensor:
    """1 / (trained tokens of the row · rows), [T]: every row weighs the same. row: int64 [T]."""
    return _mean_within(mask, row) / max(rows, 1)


@aggregation("seq_mean_token_sum", paper="RLOO 2402.14740", formula="1 / (answers of the step)")
def seq_mean_token_sum(mask: Tensor, rows: int) -> Tensor:
    """1 / rows, [T]: a row weighs as much as it is long."""
    return _floating(mask) / max(rows, 1)


@aggregation(
    "seq_mean_token_sum_norm",
    paper="Dr. GRPO 2503.20783; TRL: dr_grpo",
    formula="1 / (answers of the step × aggregation_length)",
)
def seq_mean_token_sum_norm(
    mask: Tensor, rows: int, max_length: float, *, aggregation_length: AggregationLength = None
) -> Tensor:
    """1 / (rows · aggregation_length), [T]; null stands for max_length, the longest answer that may be sampled."""
    return seq_mean_token_sum(mask, rows) / (max_length if aggregation_length is None else aggregation_length)


@aggregation("prompt_mean", paper="SkyRL", formula="1 / (trained tokens of the prompt's answers × prompts of the step)")
def prompt_mean(mask: Tensor, group: Tensor, groups: int) -> Tensor:
    """1 / (trained tokens of the prompt's samples · prompts), [T]: every prompt weighs the same. group: int64 [T]."""
    return _mean_within(mask, group) / max(groups, 1)


def _mean_within(mask: Tensor, ids: Tensor) -> Tensor:
    return _floating(mask) / sum_within((mask != 0).long(), ids).clamp(min=1)


def _floating(mask: Tensor) -> Tensor:
    return mask if mask.is_floating_point() else mask.to(torch.get_default_dtype())
