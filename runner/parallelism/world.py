"""The processes of a job as one of them sees them: groups to speak over, and what is done to a model.

place, device ──build──▶ process groups, warmed up ──▶ World ──close──▶ gone
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runner.errors import EnvironmentProblem, SpecError
from runner.parallelism.config import Mesh, MeshConfig, ParallelismConfig, ShardedConfig
from runner.parallelism.group import GroupPeers
from runner.parallelism.replicas import refuse_different
from runner.place import Place
from runner.protocols import Decide, Device, Peers
from runner.sharing import ALONE

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")  # torchrun's names


@dataclass(frozen=True, slots=True)
class World:
    """peers: the data ranks, which share out a step's batch; everyone: all ranks; both for the thread that trains;
    feed_peers: all ranks, for the thread that collects."""

    config: ParallelismConfig
    device: Device
    place: Place
    mesh: Mesh
    peers: Peers
    everyone: Peers
    feed_peers: Peers

    @property
    def sharded(self) -> bool:
        """Whether models lie in pieces; such a model is built on the CPU, and `shard` brings it to the device."""
        return isinstance(self.config, ShardedConfig) or self.mesh.tp > 1

    def admit(self, architecture: Any) -> None:
        """Raise SpecError for a transformers config whose layers do not divide into the mesh's slices."""
        if isinstance(self.config, MeshConfig) and self.mesh.tp > 1:
            text, names = architecture.get_text_config(), ("num_attention_heads", "num_key_value_heads")
            sizes = {name: getattr(text, name, None) for name in (*names, "intermediate_size")}
            if found := self.config.uneven(self.mesh, {name: size for name, size in sizes.items() if size}):
                raise SpecError(found)

    def refuse_different(self, model: Any) -> None:
        """Raise EnvironmentProblem, on all ranks, for a model that was not built alike on all of them: copies would
        drift apart, and pieces would be of several models."""
        if self.place.size > 1:
            refuse_different(model.module, self.everyone)

    def shard(self, model: Any, decide: Decide) -> None:
        """Spread a model's weights over tp and dp_shard ranks, in place, before it has an optimizer."""
        here, fit = self.device.torch_device, self.device.fuse
        if self.mesh.tp > 1:
            from runner.parallelism.tensor import cut

            cut(model, _grid(here.type, self.mesh)["tp"], device=here, fit=fit, decide=decide)
            fit = _fitted
        if not isinstance(self.config, ShardedConfig):
            return
        from runner.parallelism.shard import shard

        shard(
            model,
            _grid(here.type, self.mesh),
            device=here,
            fit=fit,
            reshard=self.config.reshard_after_forward,
            offload=self.config.cpu_offload,
            decide=decide,
        )

    def whole(self, model: Any) -> AbstractContextManager[Any]:
        """While `model` has whole weights, so that ranks may call it as often as each one needs."""
        return model.gathered() if self.sharded else nullcontext()

    def close(self) -> None:
        """End the process groups; every rank is here."""
        if self.place.size > 1:
            distributed.destroy_process_group()


def _fitted(module: nn.Module) -> None:
    """Nothing: the device's own parts are in it."""


@cache
def _grid(kind: str, mesh: Mesh) -> DeviceMesh:
    """The process groups of the mesh's dimensions, made once; without that of slices where there is one."""
    dims = len(mesh) if mesh.tp > 1 else 2
    return init_device_mesh(kind, mesh[:dims], mesh_dim_names=Mesh._fields[:dims])


def build(config: ParallelismConfig, *, device: Device, place: Place) -> World:
    """Join the other processes of the job, at the address that torchrun's variables say.

    Raises SpecError for a mesh that is not of so many processes, EnvironmentProblem where they do not meet.
    """
    mesh = config.mesh(place.size)
    if not isinstance(config, MeshConfig):
        return World(config, device, place, mesh, ALONE, ALONE, ALONE)
    return World(config, device, place, mesh, *_join(device, place, mesh, config.timeout_s))


def _join(device: Device, place: Place, mesh: Mesh, timeout_s: float) -> tuple[Peers, Peers, Peers]:
    """The data ranks, all ranks, and all ranks for another thread."""
    timeout = timedelta(seconds=timeout_s)
    here = device.torch_device
    try:
        distributed.init_process_group(
            device.backend,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            # lets groups share a communicator; but torch binds the next group to it, too, and gloo knows no NPU
            device_id=here if here.type == "cuda" else None,
        )
        collecting = distributed.new_group(backend="gloo", timeout=timeout)
        everyone, feed = (GroupPeers(group, timeout_s) for group in (distributed.group.WORLD, collecting))
        data = everyone if mesh.tp == 1 else GroupPeers(_data_group(device, place, mesh, timeout), timeout_s)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"{place} does not meet the others: {(str(error).splitlines() or [''])[0]}\n"
            f"  they meet at {' and '.join(ADDRESS)}, which `run` and torchrun set; parallelism.timeout_s={timeout_s:g}"
        ) from error
    _warm_up(everyone, here)
    _warm_up(data, here)
    feed.gather(place.rank)
    return data, everyone, feed


def _data_group(device: Device, place: Place, mesh: Mesh, timeout: timedelta) -> Any:
    """The ranks that have the same slices as this one; everyone makes every such group."""
    groups = [
        distributed.new_group(range(first, place.size, mesh.tp), timeout=timeout, backend=device.backend)
        for first in range(mesh.tp)
    ]
    return groups[place.rank % mesh.tp]


def _warm_up(peers: Peers, device: torch.device) -> None:
    """One small sum, so that what is wrong between the ranks is known now."""
    ones = torch.ones(1, device=device)
    peers.sum_([ones])
    if round(float(ones)) != peers.size:
        raise EnvironmentProblem(f"{peers.size} ranks add 1 each and find {float(ones)}: the devices do not add up")
