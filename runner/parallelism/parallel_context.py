"""The processes of a job as one of them sees them: process groups, model layout, gradient reduction.

place, device ──build──▶ process groups, warmed up ──▶ ParallelContext ──close──▶ released
backward ──▶ a part on each rank ──summed over the replicas of the same weights──▶ the same on all that hold them
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from runner.core.device_kinds import find_kind
from runner.core.errors import EnvironmentProblem, SpecError
from runner.core.rank_info import RENDEZVOUS_VARIABLES, RankInfo
from runner.distributed.gradient_sums import MeshGradientReducer
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.interfaces import Decide, Device, GradientReducer, RankCollectives, TrainableModel
from runner.parallelism.config import DdpConfig, MeshConfig, MultiProcessConfig, ParallelismConfig
from runner.parallelism.mesh import Mesh, model_sizes

if TYPE_CHECKING:  # one process needs nothing of what joins several
    from runner.parallelism.process_groups import MeshGroups


M = TypeVar("M", bound=TrainableModel)


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Process groups of a job, by purpose; groups: None where there is one process.

    peers: the data ranks, which share a step's batch; replica_peers: those whose gradients are summed; world_peers:
    all ranks. These are for the training thread. rollout_peers: all ranks, for the thread that collects experience;
    checkpoint_peers: all ranks, for the thread that writes checkpoints.
    """

    config: ParallelismConfig
    device: Device
    place: RankInfo
    mesh: Mesh
    groups: MeshGroups | None = None
    peers: RankCollectives = SINGLE_PROCESS
    replica_peers: RankCollectives = SINGLE_PROCESS
    world_peers: RankCollectives = SINGLE_PROCESS
    rollout_peers: RankCollectives = SINGLE_PROCESS
    checkpoint_peers: RankCollectives = SINGLE_PROCESS

    @property
    def is_sharded(self) -> bool:
        """Whether models are sharded or split."""
        return self.config.shards or self.mesh.model_parallel_size > 1

    @property
    def layout(self) -> str:
        """The layout, which determines the order of summation, as text."""
        return f"{self.mesh}, {self.config.name}" if self.config.deepspeed else str(self.mesh)

    def check_divisible(self, architecture: Any) -> None:
        """Raise SpecError for a transformers config whose sizes the mesh does not divide."""
        if found := self.config.divisibility_problems(self.mesh, model_sizes(architecture)):
            raise SpecError(found)

    def as_ddp(self) -> ParallelContext:
        """The same ranks for a model that is replicated on all of them."""
        return replace(self, config=DdpConfig(), mesh=Mesh(dp_replicate=self.place.size), groups=None)

    def load(self, make: Callable[[torch.device], M]) -> M:
        """The model that `make` builds: with weights on the CPU of rank 0, without weights on other ranks.

        See `weight_scatter.load_on_rank0`.
        """
        from runner.parallelism.weight_scatter import load_on_rank0

        return load_on_rank0(make, self.world_peers)

    def shard(self, model: TrainableModel, decide: Decide) -> None:
        """Distribute a loaded model's weights over all ranks. See `ParallelismPlan.apply`."""
        from runner.parallelism.apply import ParallelismPlan

        ParallelismPlan(self.config, self.mesh, self.groups, self.world_peers, self.device, decide).apply(model)

    def gradient_reducer(self, model: TrainableModel) -> GradientReducer:
        """The gradient reducer of a distributed model."""
        experts: RankCollectives = self.replica_peers
        stages: RankCollectives = SINGLE_PROCESS
        ends: RankCollectives = SINGLE_PROCESS
        if self.groups is not None and self.mesh.ep > 1:
            experts = self._peers(self.groups.by_name["expert_copies"])
        if self.groups is not None and self.mesh.pp > 1:
            stages, ends = (self._peers(self.groups.by_name[name]) for name in ("pp", "ends"))
        copies, device = self.replica_peers, self.device.torch_device
        return MeshGradientReducer(copies, device, experts, stages, ends, model.stage, model.whole)

    def _peers(self, group: Any) -> RankCollectives:
        """The collectives of a group; of a single process if this rank is not in it."""
        assert isinstance(self.config, MeshConfig)
        from runner.parallelism.process_groups import ProcessGroupCollectives

        is_member = group is not None and distributed.get_rank(group) >= 0
        return ProcessGroupCollectives(group, self.config.timeout_s) if is_member else SINGLE_PROCESS

    def summon_full_params(self, model: TrainableModel) -> AbstractContextManager[Any]:
        """A block in which `model` has full weights, so that ranks may call it any number of times."""
        return model.summon_full_params() if self.is_sharded or self.config.deepspeed else nullcontext()

    def close(self) -> None:
        """Destroy the process groups; all ranks call it."""
        if self.place.size > 1:
            distributed.destroy_process_group()


def build(config: ParallelismConfig, *, device: Device, place: RankInfo) -> ParallelContext:
    """Connect to the other ranks of the job, at the address in torchrun's variables.

    Raises SpecError if the mesh does not fit the number of ranks, EnvironmentProblem if they do not connect.
    """
    mesh = config.mesh(place.size)
    config.preflight()
    if not isinstance(config, MultiProcessConfig):
        return ParallelContext(config, device, place, mesh)
    chunks = config.pp_virtual_stages if isinstance(config, MeshConfig) else 1
    groups = _init_process_groups(device, place, mesh, chunks, config.timeout_s)
    return ParallelContext(config, device, place, mesh, *groups)


def _init_process_groups(
    device: Device, place: RankInfo, mesh: Mesh, chunks: int, timeout_s: float
) -> tuple[MeshGroups, RankCollectives, RankCollectives, RankCollectives, RankCollectives, RankCollectives]:
    """All groups, and the collectives of a `ParallelContext` in order."""
    from runner.parallelism.process_groups import ProcessGroupCollectives, create_groups

    timeout = timedelta(seconds=timeout_s)
    here = device.torch_device
    try:
        distributed.init_process_group(
            device.backend,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=here if find_kind(here.type).binds_groups else None,
        )
        threads = [distributed.new_group(backend="gloo", timeout=timeout) for _ in ("collecting", "saving")]
        found = create_groups(mesh, here.type, device.backend, timeout, chunks)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"{place} cannot connect to the other ranks: {(str(error).splitlines() or [''])[0]}\n"
            f"  they connect to {' and '.join(RENDEZVOUS_VARIABLES)}, which `run` and torchrun set; "
            f"parallelism.timeout_s={timeout_s:g}"
        ) from error
    members = (found.by_name["copies"], distributed.group.WORLD, *threads)
    copies, everyone, feed, saving = (ProcessGroupCollectives(group, timeout_s) for group in members)
    data = data_peers(found, here, timeout_s)
    if found.stage_links is not None:
        found.stage_links.warm_up(here)
    _warm_up(everyone, here)
    for group in dict.fromkeys(found.by_name.values()):  # in the same order on all ranks
        if group is not None:  # None: this rank is not in it
            _warm_up(ProcessGroupCollectives(group, timeout_s), here)
    for peers in (feed, saving):
        peers.all_gather(place.rank)
    return found, data, copies, everyone, feed, saving


def data_peers(found: MeshGroups, device: torch.device, timeout_s: float) -> RankCollectives:
    """The ranks over which the work is partitioned."""
    from runner.parallelism.process_groups import PipelineCollectives, ProcessGroupCollectives

    if found.stage_links is None:
        return ProcessGroupCollectives(found.by_name["data"], timeout_s)
    everyone = ProcessGroupCollectives(found.by_name["stages"], timeout_s)
    return PipelineCollectives(found.by_name["data"], everyone, timeout_s, device)


def _warm_up(peers: RankCollectives, device: torch.device) -> None:
    """Check a small all-reduce, so that errors between ranks appear now."""
    ones = torch.ones(1, device=device)
    peers.all_reduce_([ones])
    if round(float(ones)) != peers.size:
        text = f"an all-reduce of 1 over {peers.size} ranks returned {float(ones)}"
        raise EnvironmentProblem(f"{text}: the devices or their links are faulty")
