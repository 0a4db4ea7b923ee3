"""Any function of the logits, summed over tokens with known weights, without materializing all logits.

    hidden [S, H] ──chunk by chunk──▶ logits [chunk, V] ──terms──▶ loss [S], … ──Σ coefficients · loss──▶ total

The gradient of the total is known up to a scalar, so that it is made while a chunk's logits are there: once, forward.

Legend: S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from runner.interfaces import LogitTermsFn
from runner.model.chunked_lm_head import LogitOperands, LossWithKnownGradient, chunk_spans, is_plain_linear, local_vocab
from runner.model.parameters import stored_parameter

TermsOfChunk = Callable[[Tensor, slice], Mapping[str, Tensor]]  # a chunk's logits, and which chunk it is → its terms


def chunked_logit_loss(
    head: nn.Module,
    hidden: Tensor,
    coefficients: Tensor,
    terms: LogitTermsFn,
    tokens: Mapping[str, Tensor],
    chunk: int,
    compute: torch.dtype | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ coefficients · terms["loss"], differentiable once in hidden and head; and every term, detached.

    hidden [S, H]; coefficients float [S], constant; tokens: the channels [S, …] that `terms` gets beside the logits
    """

    def piece(logits: Tensor, span: slice) -> Mapping[str, Tensor]:
        return terms(logits, {name: channel[span] for name, channel in tokens.items()})

    cuts = list(chunk_spans(len(hidden), chunk)) or [slice(0, 0)]  # without a token the terms still have their names
    found: list[Mapping[str, Tensor]] = []
    if is_plain_linear(head) and torch.is_grad_enabled():
        weight, ids = local_vocab(head)
        operands = LogitOperands(hidden, weight, stored_parameter(head, "bias"), compute, ids)
        total: Tensor = _ChunkedLogitLoss.apply(
            hidden, weight, stored_parameter(head, "bias"), coefficients, piece, cuts, found, operands
        )
    else:
        total = _checkpointed_loss(_full_logits_head(head), hidden, coefficients, piece, cuts, found)
    return total, {name: torch.cat([one[name] for one in found]) for name in found[0]}


def _full_logits_head(head: nn.Module) -> Callable[[Tensor], Tensor]:
    """What makes logits of all ids, whoever has them."""
    if not (is_plain_linear(head) and isinstance(stored_parameter(head, "weight"), DTensor)):
        return head
    weight, ids = local_vocab(head)
    return lambda states: ids.gather_logits(F.linear(states, weight.to(states.dtype)))


def _checkpointed_loss(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    coefficients: Tensor,
    piece: TermsOfChunk,
    cuts: list[slice],
    found: list[Mapping[str, Tensor]],
) -> Tensor:
    """Of a head that is more than a matrix: its logits are made again in the backward pass."""

    def part(states: Tensor, span: slice) -> Mapping[str, Tensor]:
        return piece(head(states), span)

    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for span in cuts:
        values: Mapping[str, Tensor] = checkpoint(part, hidden[span], span, use_reentrant=False)
        total = total + (values["loss"] * coefficients[span]).sum()
        found.append({name: value.detach() for name, value in values.items()})
    return total


class _ChunkedLogitLoss(LossWithKnownGradient):
    """Logits are made once: the gradient of Σ coefficients · loss is known up to a scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        coefficients: Tensor,
        piece: TermsOfChunk,
        cuts: list[slice],
        found: list[Mapping[str, Tensor]],
        operands: LogitOperands,
    ) -> Tensor:
        operands.allocate_gradients(ctx.needs_input_grad[:3])
        total = hidden.new_zeros((), dtype=torch.promote_types(operands.weight.dtype, torch.float32))
        for span in cuts:
            logits = operands.ids.gather_logits(operands.logits(span)).requires_grad_()
            with torch.enable_grad():
                values = piece(logits, span)
                share = (values["loss"] * coefficients[span]).sum()
            [d_logits] = torch.autograd.grad(share, logits)
            operands.add_logit_gradients(span, operands.ids.local_logits(d_logits))
            total += share.detach()
            found.append({name: value.detach() for name, value in values.items()})
        ctx.grads = operands.results()
        return total
