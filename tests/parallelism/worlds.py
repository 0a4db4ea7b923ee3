"""The world of a test: that of one process, or of forked ranks that share the work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed

from runner.core.rank_info import RankInfo
from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.interfaces import Device
from runner.parallelism import process_groups as groups
from runner.parallelism.config import DdpConfig, MeshConfig, SingleConfig
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext, build, data_peers
from runner.parallelism.process_groups import ProcessGroupCollectives
from tests.parallelism.forked import TIMEOUT_S, ranks


def silent(*words: str) -> None:
    """A decision that nobody reads."""


def device() -> Cpu:
    """The processor."""
    return Cpu(CpuConfig(), decide=silent)


def alone() -> ParallelContext:
    """The world of a single process."""
    return build(SingleConfig(), device=device(), place=RankInfo())


def meshed(config: MeshConfig, mesh: Mesh, on: Device | None = None) -> ParallelContext:
    """The world of one of the ranks on this mesh, whose device is the processor or `on`. Collective."""
    on, rank, timeout = on or device(), distributed.get_rank(), timedelta(seconds=TIMEOUT_S)
    found = groups.create_groups(mesh, on.torch_device.type, on.backend, timeout, config.pp_virtual_stages)
    members = (found.by_name["copies"], *[distributed.group.WORLD] * 3)
    peers = (
        data_peers(found, on.torch_device, TIMEOUT_S),
        *(ProcessGroupCollectives(group, TIMEOUT_S) for group in members),
    )
    return ParallelContext(config, on, RankInfo(rank, mesh.world_size, rank, mesh.world_size), mesh, found, *peers)


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(world, *arguments)` returns on each of `size` ranks."""
    return ranks(size, _with_world, work, arguments)


def _with_world(rank: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    size = distributed.get_world_size()
    members = distributed.group.WORLD, *(distributed.new_group(backend="gloo") for _ in range(2))
    trainer, feed, saving = (ProcessGroupCollectives(group, TIMEOUT_S) for group in members)
    place, mesh = RankInfo(rank, size, rank, size), Mesh(dp_replicate=size)
    world = ParallelContext(DdpConfig(), device(), place, mesh, None, trainer, trainer, trainer, feed, saving)
    return work(world, *arguments)
