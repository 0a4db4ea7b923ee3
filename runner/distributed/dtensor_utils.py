"""Tensors of which each rank may hold a piece (torch's DTensor): made whole, taken apart, measured.

A plain tensor is returned unchanged, so callers need not distinguish the two. What makes a sharded tensor whole, or
measures it, is collective: all ranks call it in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

OWNER_ATTRIBUTE = "_runner_home"  # attribute of a tensor


class TensorOwner(Protocol):
    """Where a tensor lies that is on some of the ranks only; see `at_home`."""

    # all of `tensor` on every rank, which `joined` gives where it lies
    def broadcast_full(self, tensor: Tensor, make_full: Callable[[], Tensor]) -> Tensor: ...


def set_owner(tensor: Tensor, owner: TensorOwner) -> None:
    """Let `whole` find a tensor, this very object, on the ranks that have it."""
    setattr(tensor, OWNER_ATTRIBUTE, owner)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, detached, on every rank; the memory is the tensor's own where it is not sharded."""
    home: TensorOwner | None = getattr(tensor, OWNER_ATTRIBUTE, None)
    if home is None:
        return full_tensor_of_holders(tensor)
    return home.broadcast_full(tensor, lambda: full_tensor_of_holders(tensor))


def full_tensor_of_holders(tensor: Tensor) -> Tensor:
    """The same, on the ranks that hold the tensor or pieces of it; for these alone."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, detached, in the tensor's own memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Where in the whole tensor this rank's piece lies, one slice for each dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def shard_like(like: Tensor, full: Tensor) -> Tensor:
    """The part of `full` that a rank holds which holds `like`, as a tensor like it; its memory is its own.

    full: of the shape of `like`, whole, anywhere: only the piece is read.
    """
    part = full[local_slice(like)].to(local_tensor(like).device, copy=True)
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill_local(tensor: Tensor, full: Tensor) -> None:
    """Overwrite this rank's part of `tensor` with its part of `full`, which has the same shape."""
    local_tensor(tensor).copy_(full[local_slice(tensor)])


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, over all their pieces; float32 [], equal on all ranks."""
    alike: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(_sharded_dims(gradient), []).append(local_tensor(gradient))
    norms = {key: _local_norm(pieces) for key, pieces in alike.items()}
    if norms.keys() <= {None}:
        return norms.get(None, torch.zeros(()))
    squares = [_sum_over_shards(norm.float().square(), key) for key, norm in norms.items()]
    return torch.stack(squares).sum().sqrt()


def _local_norm(pieces: Sequence[Tensor]) -> Tensor:
    """The 2-norm of what this rank holds, in float32 at least: bfloat16 has three digits."""
    wide = [p if p.dtype.itemsize > 2 else torch.linalg.vector_norm(p, dtype=torch.float32) for p in pieces]
    return torch.nn.utils.get_total_norm(wide)


def _sharded_dims(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh, and those of its dimensions, over which a tensor lies in pieces; None = it is whole here."""
    if not isinstance(tensor, DTensor):
        return None
    dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return (tensor.device_mesh, dims) if dims else None


def _sum_over_shards(value: Tensor, key: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    """The sum of a value over the ranks that hold the pieces, in place."""
    for mesh, dim in [(key[0], dim) for dim in key[1]] if key else []:
        distributed.all_reduce(value, group=mesh.get_group(dim))
    return value


def clip_grads_with_norm_(max_norm: float, gradients: Sequence[Tensor], norm: Tensor) -> None:
    """Scale gradients whose norm together is `norm` to `limit`, in place, if they are above it; as torch's
    clip_grads_with_norm_, which knows no tensors in pieces over several meshes."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        held = local_tensor(gradient)
        held.mul_(factor.to(held.device))


def is_expert_sharded(parameter: Tensor) -> bool:
    """Whether other ranks hold other experts of it, and compute their gradient with this rank's tokens."""
    if not isinstance(parameter, DTensor) or "ep" not in (names := parameter.device_mesh.mesh_dim_names or ()):
        return False
    return not parameter.placements[names.index("ep")].is_replicate()


def is_reduced_in_backward(parameter: Tensor) -> bool:
    """Whether the backward pass itself adds its gradients over the data ranks: it lies in pieces on them."""
    return isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ())
