"""Tensors of which each rank may hold a piece (torch's DTensor): made whole, taken apart, measured.

A plain tensor is whole, so that nobody has to ask which of the two he has. What makes a sharded tensor whole, or
measures it, is collective: all ranks call it in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached, on every rank; the memory is the tensor's own where it is not sharded."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, detached, in the tensor's own memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def span(tensor: Tensor) -> tuple[slice, ...]:
    """Where in the whole tensor this rank's piece lies, one slice for each dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def piece(like: Tensor, full: Tensor) -> Tensor:
    """The part of `full` that a rank holds which holds `like`, as a tensor like it; its memory is its own.

    full: of the shape of `like`, whole, anywhere: only the piece is read.
    """
    part = full[span(like)].to(local(like).device, copy=True)
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill(tensor: Tensor, full: Tensor) -> None:
    """Overwrite what this rank holds of `tensor` by its part of `full`, of the same shape, of which no more is read."""
    local(tensor).copy_(full[span(tensor)])


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, over all their pieces; float32 [], equal on all ranks."""
    alike: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(_cut(gradient), []).append(local(gradient))
    norms = {key: _norm(pieces) for key, pieces in alike.items()}
    if norms.keys() <= {None}:
        return norms.get(None, torch.zeros(()))
    squares = [_added(norm.float().square(), key) for key, norm in norms.items()]
    return torch.stack(squares).sum().sqrt()


def _norm(pieces: Sequence[Tensor]) -> Tensor:
    """The 2-norm of what this rank holds, in float32 at least: bfloat16 has three digits."""
    wide = [p if p.dtype.itemsize > 2 else torch.linalg.vector_norm(p, dtype=torch.float32) for p in pieces]
    return torch.nn.utils.get_total_norm(wide)


def _cut(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh, and those of its dimensions, over which a tensor lies in pieces; None = it is whole here."""
    if not isinstance(tensor, DTensor):
        return None
    dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return (tensor.device_mesh, dims) if dims else None


def _added(value: Tensor, key: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    """The sum of a value over the ranks that hold the pieces, in place."""
    for mesh, dim in [(key[0], dim) for dim in key[1]] if key else []:
        distributed.all_reduce(value, group=mesh.get_group(dim))
    return value


def added_up(parameter: Tensor) -> bool:
    """Whether the backward pass itself adds its gradients over the data ranks: it lies in pieces on them."""
    return isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ())
