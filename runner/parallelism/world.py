"""The processes of a job as one of them sees them: groups to speak over, and what is done to a model.

place, device ──build──▶ process groups, warmed up ──▶ World ──close──▶ gone
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from runner.errors import EnvironmentProblem, SpecError
from runner.parallelism import groups
from runner.parallelism.config import MeshConfig, ParallelismConfig, ShardedConfig
from runner.parallelism.group import GroupPeers
from runner.parallelism.groups import Groups
from runner.parallelism.mesh import Mesh
from runner.parallelism.replicas import refuse_different
from runner.place import Place
from runner.protocols import Decide, Device, Peers
from runner.sharing import ALONE

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")  # torchrun's names
NAMES = {  # transformers' own, of what is divided
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "features": "intermediate_size",
    "layers": "num_hidden_layers",
    "experts": "num_experts",
}


@dataclass(frozen=True, slots=True)
class World:
    """peers: the data ranks, which share out a step's batch; copies: those whose gradients add up; everyone: all ranks;
    these for the thread that trains; feed_peers: all ranks, for the thread that collects.

    groups: None where there is one process
    """

    config: ParallelismConfig
    device: Device
    place: Place
    mesh: Mesh
    groups: Groups | None
    peers: Peers
    copies: Peers
    everyone: Peers
    feed_peers: Peers

    @property
    def sharded(self) -> bool:
        """Whether models lie in pieces; such a model is built on the CPU, and `shard` brings it to the device."""
        return isinstance(self.config, ShardedConfig) or self.mesh.tp > 1

    def admit(self, architecture: Any) -> None:
        """Raise SpecError for a transformers config that does not divide as the mesh needs it."""
        if isinstance(self.config, MeshConfig):
            text = architecture.get_text_config()
            named = {kind: (name, getattr(text, name, None)) for kind, name in NAMES.items()}
            sizes = {kind: (name, size) for kind, (name, size) in named.items() if size}
            if found := self.config.uneven(self.mesh, sizes):
                raise SpecError(found)

    def refuse_different(self, model: Any) -> None:
        """Raise EnvironmentProblem, on all ranks, for a model that was not built alike on all of them: copies would
        drift apart, and pieces would be of several models."""
        if self.place.size > 1:
            refuse_different(model.module, self.everyone)

    def shard(self, model: Any, decide: Decide) -> None:
        """Spread a model's weights over tp and dp_shard ranks, in place, before it has an optimizer."""
        here, fit = self.device.torch_device, self.device.fuse
        if self.groups is None:
            return
        if self.mesh.tp > 1:
            from runner.parallelism.tensor import cut

            cut(model, self.groups.weights["tp"], device=here, fit=fit, decide=decide)
            fit = _fitted
        if not isinstance(self.config, ShardedConfig):
            return
        from runner.parallelism.shard import shard

        shard(
            model,
            self.groups.weights["dp_replicate", "dp_shard"],
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


def build(config: ParallelismConfig, *, device: Device, place: Place) -> World:
    """Join the other processes of the job, at the address that torchrun's variables say.

    Raises SpecError for a mesh that is not of so many processes, EnvironmentProblem where they do not meet.
    """
    mesh = config.mesh(place.size)
    if not isinstance(config, MeshConfig):
        return World(config, device, place, mesh, None, ALONE, ALONE, ALONE, ALONE)
    return World(config, device, place, mesh, *_join(device, place, mesh, config.timeout_s))


def _join(device: Device, place: Place, mesh: Mesh, timeout_s: float) -> tuple[Groups, Peers, Peers, Peers, Peers]:
    """All groups; the data ranks, the copies, all ranks, and all ranks for another thread."""
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
        found = groups.made(mesh, here.type, device.backend, timeout)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"{place} does not meet the others: {(str(error).splitlines() or [''])[0]}\n"
            f"  they meet at {' and '.join(ADDRESS)}, which `run` and torchrun set; parallelism.timeout_s={timeout_s:g}"
        ) from error
    members = (found.of["data"], found.of["copies"], distributed.group.WORLD, collecting)
    data, copies, everyone, feed = (GroupPeers(group, timeout_s) for group in members)
    for peers in (everyone, data, copies):
        _warm_up(peers, here)
    feed.gather(place.rank)
    return found, data, copies, everyone, feed


def _warm_up(peers: Peers, device: torch.device) -> None:
    """One small sum, so that what is wrong between the ranks is known now."""
    ones = torch.ones(1, device=device)
    peers.sum_([ones])
    if round(float(ones)) != peers.size:
        raise EnvironmentProblem(f"{peers.size} ranks add 1 each and find {float(ones)}: the devices do not add up")
