"""Collectives between ranks that have gradients.

added       the sum of what the ranks have, on all of them; each finds the whole gradient of its own summand
exchanged   run r of what a rank has goes to rank r, whose runs come in the order of the ranks
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


def added(tensor: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of `group`, for what all of them go on to compute alike: the gradient of a summand is
    that of the sum, which every rank finds. Collective forward only."""
    made: Tensor = _Added.apply(tensor, group)  # type: ignore[no-untyped-call]
    return made


def exchanged(tensor: Tensor, group: Any) -> Tensor:
    """What the ranks of `group` have for this one, [C · n, F] as `tensor`: of C ranks the first n rows are for the
    first one, and come from it. Collective in both directions; the gradient goes the same way back."""
    made: Tensor = _Exchanged.apply(tensor, group)  # type: ignore[no-untyped-call]
    return made


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(tensor: Tensor, group: Any) -> Tensor:
    """Two numbers of 16 bits travel as one of 32: HCCL documents all-to-all for float32 alone."""
    tensor = tensor.contiguous()
    moved = tensor.view(torch.float32) if tensor.dtype.itemsize == 2 and tensor.shape[-1] % 2 == 0 else tensor
    found = torch.empty_like(moved)
    distributed.all_to_all_single(found, moved, group=group)
    return found.view(tensor.dtype)
