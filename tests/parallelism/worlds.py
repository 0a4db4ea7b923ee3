"""The world of a test: that of one process, or of forked ranks that share the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.parallelism.config import DdpConfig, SingleConfig
from runner.parallelism.group import GroupPeers
from runner.parallelism.mesh import Mesh
from runner.parallelism.world import World, build
from runner.place import Place
from tests.parallelism.forked import TIMEOUT_S, ranks


def silent(*words: str) -> None:
    """A decision that nobody reads."""


def device() -> Cpu:
    """The processor."""
    return Cpu(CpuConfig(), decide=silent)


def alone() -> World:
    """The world of a single process."""
    return build(SingleConfig(), device=device(), place=Place())


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(world, *arguments)` returns on each of `size` ranks."""
    return ranks(size, _with_world, work, arguments)


def _with_world(rank: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    size = distributed.get_world_size()
    groups = distributed.group.WORLD, distributed.new_group(backend="gloo")
    trainer, feed = (GroupPeers(group, TIMEOUT_S) for group in groups)
    place, mesh = Place(rank, size, rank, size), Mesh(dp_replicate=size)
    world = World(DdpConfig(), device(), place, mesh, None, trainer, trainer, trainer, feed)
    return work(world, *arguments)
