"""A model in pieces on many devices: torch's fully_shard (FSDP2), layer by layer.

    fsdp   dp_replicate 1, dp_shard n    each rank holds 1/n of every tensor, of its gradient and of its optimizer state
    hsdp   dp_replicate m, dp_shard n    the same m times over; gradients are summed over the m as well

Layers are gathered one after the other, each freed when it has been used; embedding, norm, head and whatever else there
is are one group, in which tied weights stay tied. Gradients are sums over all ranks, as everywhere here, and are summed
in float32. Weights are gathered in what the model computes in, whatever they are stored in: no layer casts them again,
and no cast is kept for the backward pass. Routers, score heads and value heads are groups of their own, in float32.
With `model.head_dtype=float32`, embedding, norm and head are gathered as they are stored.
"""

from __future__ import annotations

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


def apply_fsdp(
    model: TrainableModel,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    *,
    device: torch.device,
    reshard: bool,
    offload: bool,
    decide: Decide,
) -> None:
    """Replace every parameter of `model`, on the meta device, by this rank's shard (see `weight_scatter`).

    mesh: dp_replicate, dp_shard, and what the model is cut over by now; experts: the same for experts that are spread,
    see `Mesh.expert_grid`; device: where it computes; reshard: whether a layer is gathered again for the backward pass;
    offload: whether pieces will lie on the CPU. The model's parameters are other objects afterwards. Raises
    EnvironmentProblem for a torch whose fully_shard lacks what is used.
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
    if experts is not None:
        policy["ignored_params"] |= _shard_experts(model, experts, reshard, policy, decide)
    root = policy
    if model.compute_dtype == torch.bfloat16:
        wide = policy | {"mp_policy": _mixed_precision_policy(torch.float32)}
        for part in model.float32_modules():
            if getattr(part, "computes_in_float32", False):  # model.head_dtype: a head is read outside of its forward,
                root = wide  # so it stays with embedding and norm, all gathered as stored and cast when they are read
            elif policy["ignored_params"].isdisjoint(part.parameters()):
                fully_shard(part, mesh=_gradient_mesh(mesh), reshard_after_forward=reshard, **wide)
    for block in blocks:
        fully_shard(block, mesh=_gradient_mesh(mesh), reshard_after_forward=reshard, **policy)
    fully_shard(model.whole, mesh=_gradient_mesh(mesh), reshard_after_forward=False, **root)
    model.whole.reshard_after_forward = reshard
    for part in model.whole.modules():
        if isinstance(part, FSDPModule):
            torch_compat.set_gradient_sum_reduction(part)
    where = "in host memory" if offload else "on the devices"
    reason = "rank 0 loads the whole model into host memory and scatters it tensor by tensor"
    decide.record_fact("parallelism", f"{mesh['dp_shard'].size()} shards of {len(blocks)} layers, {where}", reason)


def _mixed_precision_policy(compute: torch.dtype) -> MixedPrecisionPolicy:
    """Gather in what a model computes in, bfloat16 or what is stored, and sum gradients in float32."""
    low = compute if compute == torch.bfloat16 else None
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _shard_experts(
    model: TrainableModel, mesh: DeviceMesh, reshard: bool, policy: dict[str, Any], decide: Decide
) -> set[nn.Parameter]:
    """Shard each layer's experts over the ranks that have the same ones; returns those left as they are."""
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
    """The dimensions over which gradients are summed: replicas, if there are any, and shards."""
    copies = "dp_replicate" in (mesh.mesh_dim_names or ()) and mesh["dp_replicate"].size() > 1
    return mesh["dp_replicate", "dp_shard"] if copies else mesh["dp_shard"]
