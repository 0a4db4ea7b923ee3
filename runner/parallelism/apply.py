"""Apply a mesh to a model that rank 0 has loaded: tensor, expert, pipeline and context parallel, FSDP.

weights removed ──▶ structure split and sharded on `meta` ──▶ weights scattered ──▶ outputs compared with those before

Afterwards a few tokens are computed again; a model that computes other values than before is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, distributed

from runner.core.errors import Problem, SpecError
from runner.core.rank_info import is_connection_loss
from runner.distributed.work_partition import run_on_rank0
from runner.interfaces import ContextParallelStyle, Decide, Device, RankCollectives, TrainableModel
from runner.parallelism.config import MeshConfig, ParallelismConfig, ShardedConfig
from runner.parallelism.mesh import Mesh, parallelism_error
from runner.parallelism.process_groups import MeshGroups
from runner.parallelism.weight_scatter import WeightScatter, tensor_slots

PARALLELISM = {"pp": "pipeline", "tp": "tensor", "ep": "expert", "cp": "context"}


def refuse_changed_model(model: TrainableModel, wanted: Tensor, world_peers: RankCollectives, dim: str) -> None:
    """Raise SpecError on all ranks if the model computes other values than before.

    If the model cannot compute at all, the ranks that cannot raise. Collective over all ranks. Exhausted memory and
    lost ranks are not reported as an error of the model.

    wanted: what the model computed before; dim: the dimension of the mesh that was applied
    """
    name, how = type(model.inner).__name__, f"with {PARALLELISM[dim]} parallelism"
    try:
        alike = model.matches_probe(wanted)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:  # of whatever kind it is
        if is_connection_loss(str(error)):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise parallelism_error(dim, f"{name} cannot compute {how} ({reason})") from error
    if not all(world_peers.all_gather(alike)):
        raise parallelism_error(dim, f"{name} computes different values {how}")


def apply_context_parallel(
    model: TrainableModel,
    group: Any,
    world_peers: RankCollectives,
    *,
    style: ContextParallelStyle | None,
    tp_size: int,
    decide: Decide,
) -> None:
    """Let each rank of `group` compute only its tokens of every batch. Collective over all ranks.

    model: with its weights or shards; style: None = ulysses if possible; tp_size: number of tensor-parallel ranks.
    Raises SpecError, on all ranks, for a model that does not support it or computes other values with it.
    """
    name = type(model.inner).__name__
    if model.is_padded:
        raise parallelism_error("cp", f"{name} runs padded batches (model.batch_layout), which cp cannot split")
    wanted = model.probe_hidden()
    chosen = _choose_cp_style(model, distributed.get_world_size(group), style, tp_size, decide)
    model.enable_context_parallel(group, chosen)
    refuse_changed_model(model, wanted, world_peers, "cp")


def _choose_cp_style(
    model: TrainableModel, ranks: int, style: ContextParallelStyle | None, tp_size: int, decide: Decide
) -> ContextParallelStyle:
    heads = model.inner.config.get_text_config().num_attention_heads // tp_size
    fits = heads % ranks == 0
    if style == "ulysses" and not fits:
        most = gcd(heads, ranks)
        text = f"cp={ranks} does not divide the {heads} heads of a tp rank; type parallelism.cp_backend=ring"
        raise SpecError([Problem("parallelism.cp", f"{text}, or parallelism.cp={most}" if most > 1 else text)])
    if style is None:
        style = "ulysses" if fits else "ring"
        each = " per tp rank" if tp_size > 1 else ""
        decide.record_fact("parallelism.cp_backend", style, f"cp={ranks}, and {heads} heads{each}")
    return style


@dataclass(frozen=True, slots=True)
class ParallelismPlan:
    """How models are distributed. groups: None if each rank has whole models; world_peers: all ranks."""

    config: ParallelismConfig
    mesh: Mesh
    groups: MeshGroups | None
    world_peers: RankCollectives
    device: Device
    decide: Decide

    def apply(self, model: TrainableModel) -> None:
        """Distribute `model` in place, before it has an optimizer. Collective; raises SpecError."""
        device = self.device.torch_device
        offload = isinstance(self.config, ShardedConfig) and self.config.cpu_offload
        wanted = run_on_rank0(self.world_peers, model.probe_hidden) if self.mesh.model_parallel_size > 1 else None
        weights = WeightScatter(model.whole, self.world_peers, device)
        kinds = {frozenset(map(type, block.modules())): block for block in reversed(model.transformer_blocks())}
        with weights.materialize(model.whole, list(kinds.values())):  # the device tries its fused operators there
            self.device.apply_fused_ops(model.inner, model.config.kernels)
        if self.groups is not None:
            self._shard_parameters(model, self.groups)
        absent = [name for name, slot in tensor_slots(model.whole) if slot.tensor in model.stage.absent_modules]
        weights.scatter(model.whole, torch.device("cpu") if offload else device, absent)
        model.device = device
        with torch.no_grad():
            model.whole.run(lambda: None)  # fully_shard initializes its state here
        model.stage.on_parameters_ready()
        if wanted is not None:
            dim = next(dim for dim in PARALLELISM if getattr(self.mesh, dim) > 1)
            refuse_changed_model(model, wanted, self.world_peers, dim)
        if self.groups is not None and isinstance(self.config, MeshConfig) and self.mesh.cp > 1:
            peers, group, style = self.world_peers, self.groups.by_name["cp"], self.config.cp_backend
            apply_context_parallel(model, group, peers, style=style, tp_size=self.mesh.tp, decide=self.decide)

    def _shard_parameters(self, model: TrainableModel, groups: MeshGroups) -> None:
        """Replace each parameter by this rank's shard, on the meta device."""
        if self.mesh.tp > 1:
            from runner.parallelism.tensor_parallel import apply_tensor_parallel

            apply_tensor_parallel(model, groups.weights["tp"], decide=self.decide)
        if self.mesh.ep > 1:
            from runner.parallelism.expert_parallel import apply_expert_parallel

            alone = self.mesh.tp == 1 and not self.config.shards
            apply_expert_parallel(model, groups.experts["ep"], alone=alone, decide=self.decide)
        if isinstance(self.config, MeshConfig) and groups.stage_links is not None:
            from runner.parallelism.pipeline_parallel import apply_pipeline_parallel

            chunks, device = self.config.pp_virtual_stages, self.device.torch_device
            apply_pipeline_parallel(model, groups.stage_links, groups.by_name["pp"], chunks=chunks, device=device)
        if isinstance(self.config, ShardedConfig):
            from runner.parallelism.fsdp import apply_fsdp

            apply_fsdp(
                model,
                groups.weights,
                groups.experts if self.mesh.ep > 1 else None,
                device=self.device.torch_device,
                reshard=self.config.reshard_after_forward,
                offload=self.config.cpu_offload,
                memory=min(self.world_peers.all_gather(device_memory(self.device.torch_device))),
                decide=self.decide,
            )


def device_memory(device: torch.device) -> int:
    """Bytes of a device's memory; 0 for the CPU."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).mem_get_info(device)[1])
