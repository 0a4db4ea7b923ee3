"""Collectives between ranks that have gradients.

added       the sum of what the ranks have, on all of them; each finds the whole gradient of its own summand
exchanged   run r of what a rank has goes to rank r, whose runs come in the order of the ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

Rows = Sequence[int] | None


def added(tensor: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of `group`, for what all of them go on to compute alike: the gradient of a summand is
    that of the sum, which every rank finds. Collective forward only."""
    made: Tensor = _Added.apply(tensor, group)  # type: ignore[no-untyped-call]
    return made


def exchanged(tensor: Tensor, group: Any, there: Rows = None, here: Rows = None) -> Tensor:
    """What the ranks of `group` have for this one, as `tensor` [Σ there, F] is for them: the first rows for the first
    one, and from it. Collective in both directions; the gradient goes the same way back.

    there, here: how many rows go to each rank, and come from it; None = as many as to any other
    """
    made: Tensor = _Exchanged.apply(tensor, group, there, here)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, tensor: Tensor, group: Any, there: Rows, here: Rows) -> Tensor:
        ctx.group, ctx.there, ctx.here = group, there, here
        return all_to_all(tensor, group, there, here)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, ctx.here, ctx.there), None, None, None


class Post(NamedTuple):
    """Rows that are on their way."""

    coming: Tensor
    going: Tensor  # has to be there until it is gone
    dtype: torch.dtype
    work: Any

    def arrived(self) -> Tensor:
        """What has come, [Σ here, F]."""
        self.work.wait()
        return self.coming.view(self.dtype)


def all_to_all(tensor: Tensor, group: Any, there: Rows = None, here: Rows = None) -> Tensor:
    """`exchanged` without a gradient, of any type."""
    return posted(tensor, group, there, here).arrived()


def posted(tensor: Tensor, group: Any, there: Rows = None, here: Rows = None) -> Post:
    """The same, begun. Numbers of 16 and of 64 bits travel as of 32: HCCL documents all-to-all for float32 alone."""
    tensor = tensor.contiguous()
    moved = tensor.view(torch.float32) if tensor.shape[-1] * tensor.itemsize % 4 == 0 else tensor
    found = torch.empty_like(moved) if here is None else moved.new_empty(sum(here), *moved.shape[1:])
    sizes = (None if here is None else list(here), None if there is None else list(there))
    work = distributed.all_to_all_single(found, moved, *sizes, group=group, async_op=True)
    return Post(found, moved, tensor.dtype, work)
