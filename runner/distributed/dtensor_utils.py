"""Functions for tensors that may be sharded (torch's DTensor): full tensor, local shard, norm.

Plain tensors are accepted too, so callers need not distinguish them. Functions that gather or measure a sharded tensor
are collective: all ranks call them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from runner.core.quantized_weight import QuantizedWeight

OWNER_ATTRIBUTE = "_runner_home"  # attribute of a tensor


class TensorOwner(Protocol):
    """The ranks of a tensor that only some ranks have; see `set_owner`."""

    # the full tensor on every rank; make_full: returns it on the ranks that have it
    def broadcast_full(self, tensor: Tensor, make_full: Callable[[], Tensor]) -> Tensor: ...


def set_owner(tensor: Tensor, owner: TensorOwner) -> None:
    """Let `full_tensor` get this tensor object from the ranks that have it."""
    setattr(tensor, OWNER_ATTRIBUTE, owner)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, detached, on every rank; it shares the memory of a tensor that is not sharded."""
    home: TensorOwner | None = getattr(tensor, OWNER_ATTRIBUTE, None)
    if home is None:
        return full_tensor_of_holders(tensor)
    return home.broadcast_full(tensor, lambda: full_tensor_of_holders(tensor))


def full_tensor_of_holders(tensor: Tensor) -> Tensor:
    """The full tensor, on the ranks that have it or its shards; only these call it."""
    with torch.no_grad():
        if isinstance(tensor, QuantizedWeight):
            return tensor.dequantize()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, detached, in the tensor's own memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """The position of this rank's shard in the full tensor, one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def shard_like(like: Tensor, full: Tensor) -> Tensor:
    """A new tensor that is sharded like `like`, with this rank's part of `full`.

    full: a full tensor of the shape of `like`, on any device; only the shard is read.
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
    """The 2-norm of all gradients together, over all their shards; float32 [], equal on all ranks."""
    alike: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(_sharded_dims(gradient), []).append(local_tensor(gradient))
    norms = {key: _local_norm(pieces) for key, pieces in alike.items()}
    if norms.keys() <= {None}:
        return norms.get(None, torch.zeros(()))
    squares = [_sum_over_shards(norm.float().square(), key) for key, norm in norms.items()]
    return torch.stack(squares).sum().sqrt()


def _local_norm(pieces: Sequence[Tensor]) -> Tensor:
    """The 2-norm of local shards, at least in float32: bfloat16 has three digits."""
    wide = [p if p.dtype.itemsize > 2 else torch.linalg.vector_norm(p, dtype=torch.float32) for p in pieces]
    return torch.nn.utils.get_total_norm(wide)


def _sharded_dims(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh, and its dimensions over which a tensor is sharded; None = not sharded."""
    if not isinstance(tensor, DTensor):
        return None
    dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return (tensor.device_mesh, dims) if dims else None


def _sum_over_shards(value: Tensor, key: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    """Sum a value over the ranks with shards, in place."""
    for mesh, dim in [(key[0], dim) for dim in key[1]] if key else []:
        distributed.all_reduce(value, group=mesh.get_group(dim))
    return value


def clip_grads_with_norm_(max_norm: float, gradients: Sequence[Tensor], norm: Tensor) -> None:
    """Scale gradients with total norm `norm` to `max_norm`, in place, if it is above.

    Like torch's clip_grads_with_norm_, which does not support shards over several meshes, and multiplies by 1 as well.
    """
    factor = max_norm / (norm + 1e-6)
    if factor >= 1:
        return
    by_device: dict[torch.device, list[Tensor]] = {}  # experts may stay on theirs where the others are offloaded
    for held in map(local_tensor, gradients):
        by_device.setdefault(held.device, []).append(held)
    for device, pieces in by_device.items():
        torch._foreach_mul_(pieces, factor.to(device))


def is_expert_sharded(parameter: Tensor) -> bool:
    """Whether other ranks have other experts of it, and compute their gradient with this rank's tokens."""
    if not isinstance(parameter, DTensor) or "ep" not in (names := parameter.device_mesh.mesh_dim_names or ()):
        return False
    return not parameter.placements[names.index("ep")].is_replicate()


def is_reduced_in_backward(parameter: Tensor) -> bool:
    """Whether the backward pass sums its gradients over the data ranks, because it is sharded over them."""
    return isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ())
