"""Differentiable collectives.

all_reduce            the sum over ranks; each rank computes the full gradient of its own summand
all_to_all_autograd   chunk r of a rank's rows goes to rank r, which receives chunks in the order of ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

SplitSizes = Sequence[int] | None


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of `group`; the gradient of a summand is that of the sum.

    Every rank computes that gradient itself, so only the forward pass is collective.
    """
    made: Tensor = _AllReduce.apply(tensor, group)  # type: ignore[no-untyped-call]
    return made


def all_to_all_autograd(
    tensor: Tensor, group: Any, send_sizes: SplitSizes = None, receive_sizes: SplitSizes = None
) -> Tensor:
    """All-to-all of rows of `tensor` [Σ there, F] in the order of ranks; collective in both directions.

    there, here: number of rows to and from each rank; None = the same number for all
    """
    made: Tensor = _AllToAll.apply(tensor, group, send_sizes, receive_sizes)  # type: ignore[no-untyped-call]
    return made


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, there: SplitSizes, here: SplitSizes) -> Tensor:
        ctx.group, ctx.there, ctx.here = group, there, here
        return all_to_all(tensor, group, there, here)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, ctx.here, ctx.there), None, None, None


class AsyncAllToAll(NamedTuple):
    """An all-to-all in progress."""

    received_buffer: Tensor
    sent_buffer: Tensor  # must live until the transfer ends
    dtype: torch.dtype
    work: Any

    def wait(self) -> Tensor:
        """Wait; returns the received rows, [Σ here, F]."""
        self.work.wait()
        return self.received_buffer.view(self.dtype)


def all_to_all(tensor: Tensor, group: Any, send_sizes: SplitSizes = None, receive_sizes: SplitSizes = None) -> Tensor:
    """`all_to_all_autograd` without a gradient, of any type."""
    return start_all_to_all(tensor, group, send_sizes, receive_sizes).wait()


def start_all_to_all(
    tensor: Tensor, group: Any, send_sizes: SplitSizes = None, receive_sizes: SplitSizes = None
) -> AsyncAllToAll:
    """Start an all-to-all.

    16-bit and 64-bit numbers are sent as 32-bit: HCCL documents all-to-all for float32 alone.
    """
    tensor = tensor.contiguous()
    moved = tensor.view(torch.float32) if tensor.shape[-1] * tensor.itemsize % 4 == 0 else tensor
    found = torch.empty_like(moved) if receive_sizes is None else moved.new_empty(sum(receive_sizes), *moved.shape[1:])
    sizes = (None if receive_sizes is None else list(receive_sizes), None if send_sizes is None else list(send_sizes))
    work = distributed.all_to_all_single(found, moved, *sizes, group=group, async_op=True)
    return AsyncAllToAll(found, moved, tensor.dtype, work)
