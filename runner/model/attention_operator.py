"""Packed attention as one operator, opaque to torch.compile.

A compiled layer gets where rows end as tensors, so that no batch needs a graph of its own. The backward pass computes
the attention again by torch's own kernels, row by row, as the operator keeps nothing but its inputs. A kernel of the
device's own is traced and not wrapped here.

Legend: T tokens, d head size; see `runner.model.packed_attention`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from runner.model.packed_attention import PackedRows, attend_by_rows
from runner.model.shared_prompt_attention import define_operator

OPERATOR = "runner::packed_attention"
BACKWARD = "runner::packed_attention_backward"
INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor buckets, Tensor? index, Tensor? inverse, int? window, float? scale"
)

attend_uncompiled = torch.compiler.disable(attend_by_rows)  # with dropout, which the operator has not


@cache
def define_packed_attention() -> None:
    """Define `torch.ops.runner.packed_attention` and its backward pass; arguments: see `PackedRows`."""
    define_operator(OPERATOR, INPUTS, "Tensor", _attend, _attend_fake)
    define_operator(BACKWARD, f"Tensor grad, {INPUTS}", "(Tensor, Tensor, Tensor)", _backward, _backward_fake)
    torch.library.register_autograd(OPERATOR, _gradients, setup_context=_save)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: Tensor,
    index: Tensor | None,
    inverse: Tensor | None,
    window: int | None,
    scale: float | None,
) -> Tensor:
    return attend_by_rows(query, key, value, PackedRows(buckets, index, inverse), window, 0.0, scale)


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *layout: object) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        out = _attend(*inputs, *layout)  # type: ignore[arg-type]
    return tuple(found.contiguous() for found in torch.autograd.grad(out, inputs, grad))


def _backward_fake(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[:3])


def _save(ctx: object, inputs: tuple[object, ...], output: Tensor) -> None:
    *tensors, window, scale = inputs
    ctx.save_for_backward(*tensors)  # type: ignore[attr-defined]
    ctx.options = window, scale  # type: ignore[attr-defined]


def _gradients(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
    backward = torch.ops.runner.packed_attention_backward
    found = backward(grad, *ctx.saved_tensors, *ctx.options)  # type: ignore[attr-defined]
    return (*found, None, None, None, None, None)
