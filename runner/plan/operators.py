"""Fused operators without arithmetic: their outputs' shapes, and the memory that they keep for the backward pass.

What is kept follows torch_npu's own autograd formulas. All run on the meta device, see `tracking`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner import compat


class _Kept(torch.autograd.Function):
    """Makes an empty output of `shape`, keeps its inputs and `more` float32 numbers; gradients are as the inputs."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], more: int, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs, inputs[0].new_empty(more, dtype=torch.float32))
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:-1]
        needed = zip(inputs, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(torch.empty_like(one) if wanted else None for one, wanted in needed))


_kept: Callable[..., Tensor] = _Kept.apply


class MetaOperators:
    """The part of torch_npu that `device.npu_fused` uses."""

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Keeps x, gamma and a float32 per row."""
        rows = x.shape[:-1].numel()
        return _kept(x.shape, rows, x, gamma), x.new_empty(rows)

    def npu_rotary_mul(self, x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor:
        """Keeps all of its inputs."""
        return _kept(x.shape, 0, x, cos, sin)

    def npu_swiglu(self, x: Tensor, dim: int) -> Tensor:
        """Keeps gate and up, side by side."""
        return _kept((*x.shape[:-1], x.shape[-1] // 2), 0, x)

    def npu_grouped_matmul(self, x: Sequence[Tensor], weight: Sequence[Tensor], **options: Any) -> Sequence[Tensor]:
        """[S, K] times [E, K, N] → [S, N], or, grouped along the sum, [K, S] times [S, N] → [E, K, N]."""
        (left,), (right,) = x, weight
        if options["group_type"] == 0:
            return [left.new_empty(left.shape[0], right.shape[-1])]
        return [left.new_empty(len(options["group_list"]), left.shape[0], right.shape[-1])]


def grouped_product(left: Tensor, right: Tensor, offs: Tensor, *_: Any) -> Tensor:
    """[S, K] times [E, K, N] → [S, N], or, grouped along the sum, [K, S] times [S, N] with E ends → [E, K, N]; torch's
    own knows bfloat16 only on the meta device."""
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(len(offs), left.shape[0], right.shape[1])


MEANINGS: dict[Any, Callable[..., Tensor]] = dict.fromkeys(compat.operators("_grouped_mm"), grouped_product)


class _Attention(torch.autograd.Function):
    """Keeps what fused attention keeps: its inputs, its output, and a float32 per query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *, dtype: torch.dtype, **_: Any) -> Tensor:
    """A `VarlenAttention` in `dtype`."""
    fused: Callable[..., Tensor] = _Attention.apply
    return fused(query.to(dtype), key.to(dtype), value.to(dtype))
