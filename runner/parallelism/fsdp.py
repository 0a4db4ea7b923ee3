"""FSDP: a model sharded layer by layer with torch's fully_shard (FSDP2).

    fsdp   dp_replicate 1, dp_shard n    each rank has 1/n of every tensor, its gradient and its optimizer state
    hsdp   dp_replicate m, dp_shard n    m replicas of that; gradients are also summed over the m

Layers are gathered one at a time and freed after use; embedding, norm, head and all other modules are one group, in
which tied weights stay tied. Gradients are sums over all ranks, in float32. Weights are gathered in the model's compute
dtype, whatever dtype they are stored in: layers do not cast them, and no cast is stored for the backward pass. Routers,
score heads and value heads are their own groups, in float32. With `model.head_dtype=float32`, embedding, norm and head
are gathered in the stored dtype.

A layer is gathered, with its router and experts, while its neighbor computes. The last layer is not freed between its
forward and its backward pass. Where memory allows, micro-batches add their gradients on each rank, and only the last
one sums them over the ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from runner.core import torch_compat
from runner.core.device_kinds import find_kind
from runner.distributed.dtensor_utils import local_tensor
from runner.interfaces import Decide, TrainableModel
from runner.parallelism.expert_parallel import expert_layers as spread_layers

ACCUMULATED_SHARE = 1 / 16  # of a device's memory: well within what a plan adds for fragmentation


def apply_fsdp(
    model: TrainableModel,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    *,
    device: torch.device,
    reshard: bool,
    offload: bool,
    memory: int,
    decide: Decide,
) -> None:
    """Replace every parameter of `model`, on the meta device, by this rank's shard (see `weight_scatter`).

    mesh: dp_replicate, dp_shard, and the dimensions that already split the model; experts: the same for expert
    parallelism, see `Mesh.expert_grid`; device: where it computes; reshard: whether a layer is gathered again for the
    backward pass; offload: whether shards are on the CPU; memory: of the smallest device, 0 = unknown. The model's
    parameters are other objects afterwards. Raises EnvironmentProblem for a torch with an unsupported fully_shard.
    """
    blocks = model.transformer_blocks()
    if not blocks:
        text = f"{type(model.inner).__name__} does not declare its layer classes"
        decide("parallelism", "sharded layer by layer", "sharded as one unit", text)
    pins = find_kind(device.type).pins_offload
    policy: dict[str, Any] = {
        "mp_policy": _mixed_precision_policy(model.compute_dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=pins) if offload else OffloadPolicy(),
        "ignored_params": {one for one in model.stage.absent_modules if isinstance(one, nn.Parameter)},
    }
    _choose_accumulation(model, policy["ignored_params"], 0 if offload else memory, decide)
    if experts is not None:
        policy["ignored_params"] |= _shard_experts(model, experts, reshard, policy, decide)
    root = policy
    if model.compute_dtype == torch.bfloat16:
        wide = policy | {"mp_policy": _mixed_precision_policy(torch.float32)}
        for part in model.float32_modules():
            if getattr(part, "computes_in_float32", False):  # model.head_dtype: a head is used outside of its forward,
                root = wide  # so it stays in the group of embedding and norm, which is gathered in the stored dtype
            elif policy["ignored_params"].isdisjoint(part.parameters()):
                fully_shard(part, mesh=_gradient_mesh(mesh), reshard_after_forward=reshard, **wide)
    for block in blocks:
        fully_shard(block, mesh=_gradient_mesh(mesh), reshard_after_forward=reshard, **policy)
    fully_shard(model.whole, mesh=_gradient_mesh(mesh), reshard_after_forward=False, **root)
    groups = _groups(model.whole)
    for one in groups:
        torch_compat.set_gradient_sum_reduction(one)
    _prefetch_neighbors(model, blocks)
    kept = {model.whole, *(_groups(blocks[-1]) if blocks else ())}
    for one in kept:
        torch_compat.reshard_after_forward(one, False)
    model.whole.resharded = frozenset(groups) - kept if reshard else frozenset()
    where = "in host memory" if offload else "on the devices"
    reason = "rank 0 loads the whole model into host memory and scatters it tensor by tensor"
    decide.record_fact("parallelism", f"{mesh['dp_shard'].size()} shards of {len(blocks)} layers, {where}", reason)


def _groups(part: nn.Module) -> list[FSDPModule]:
    """The modules in `part`, itself included, whose parameters are gathered together."""
    return [one for one in part.modules() if isinstance(one, FSDPModule)]


def _prefetch_neighbors(model: TrainableModel, blocks: list[nn.Module]) -> None:
    """Gather the next layer in the forward pass, the previous one in the backward pass, within a stage.

    With all its groups: a router would be gathered only when it computes, and would choose what to gather by itself.
    """
    if blocks and model.stage.num_stages == 1:
        model.whole.set_modules_to_forward_prefetch(_groups(blocks[0]))
    for layers in model.whole.modules():
        for before, after in pairwise(layers.children() if isinstance(layers, nn.ModuleList) else ()):
            if before in blocks and after in blocks:
                before.set_modules_to_forward_prefetch(_groups(after))  # type: ignore[operator]
                for part in _groups(after):
                    part.set_modules_to_backward_prefetch(_groups(before))


def accumulates_unsharded(gradient_bytes: int, memory: int) -> bool:
    """Whether a device of so much memory, 0 = unknown, also has room for unsharded float32 gradients."""
    return gradient_bytes <= ACCUMULATED_SHARE * memory


def _choose_accumulation(model: TrainableModel, ignored: set[nn.Parameter], memory: int, decide: Decide) -> None:
    """Decide whether only the last micro-batch of an update sums gradients over the ranks."""
    learns = [p for p in model.whole.parameters() if p.requires_grad and p not in ignored]
    size = sum(4 * local_tensor(p).numel() for p in learns)
    model.whole.accumulates_gradients = once = bool(size) and accumulates_unsharded(size, memory)
    if size:
        text = (
            f"unsharded, they are {size / 2**30:.1f} GiB of float32, the smallest device has {memory / 2**30:.0f} GiB"
        )
        reason = text if memory else "no device memory is known"
        decide.record_fact("gradients", f"summed over ranks in {'the last' if once else 'every'} micro-batch", reason)


def _mixed_precision_policy(compute: torch.dtype) -> MixedPrecisionPolicy:
    """Gather in the compute dtype (bfloat16, or the stored one), and sum gradients in float32."""
    low = compute if compute == torch.bfloat16 else None
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _shard_experts(
    model: TrainableModel, mesh: DeviceMesh, reshard: bool, policy: dict[str, Any], decide: Decide
) -> set[nn.Parameter]:
    """Shard each layer's experts over the ranks that have the same ones; returns unsharded ones."""
    layers = [part for part in spread_layers(model.inner) if policy["ignored_params"].isdisjoint(part.parameters())]
    every = {p for part in layers for p in part.parameters()}
    pieces = mesh["dp_shard"].size()
    if pieces == 1:
        return every
    fits = (dim for dim in (0, 1) if all(local_tensor(p).shape[dim] % pieces == 0 for p in every))
    if (dim := next(fits, None)) is None:
        text = f"{pieces} shards divide neither the experts of a rank nor their features"
        decide("parallelism.ep", "sharded experts", "not sharded", text)
        return every
    policy = policy | {"mesh": _gradient_mesh(mesh), "shard_placement_fn": lambda _: Shard(dim)}
    for part in layers:
        fully_shard(part, reshard_after_forward=reshard, **policy)
    return set()


def _gradient_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions over which gradients are summed: shards and, if there are several, replicas."""
    copies = "dp_replicate" in (mesh.mesh_dim_names or ()) and mesh["dp_replicate"].size() > 1
    return mesh["dp_replicate", "dp_shard"] if copies else mesh["dp_shard"]
