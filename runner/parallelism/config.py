"""How one job is spread over devices: one schema, whose names are presets."""

from collections.abc import Mapping
from math import gcd, prod
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from runner.errors import Problem, SpecError
from runner.spec.base import ComponentConfig


class Mesh(NamedTuple):
    """The ranks of a job as a grid: copies of the model, each in so many parts, whose layers are cut in so many slices.

    The ranks of a model's slices are neighbours.
    """

    dp_replicate: int
    dp_shard: int
    tp: int = 1

    @property
    def data(self) -> int:
        """Between how many ranks the work is dealt out; the ranks of slices do the same work."""
        return self.dp_replicate * self.dp_shard


class ParallelismConfig(ComponentConfig):
    """The device mesh of the trainer."""

    group: ClassVar[str] = "parallelism"
    factory: ClassVar[str] = "runner.parallelism.world:build"

    def mesh(self, world: int) -> Mesh:
        """The grid of `world` ranks. Raises SpecError, with what would fit, where there is none."""
        raise NotImplementedError

    def problems(self, job: Any) -> list[tuple[str, str]]:
        try:
            self.mesh(job.launch.world)
        except SpecError as error:
            return [(problem.key, problem.message) for problem in error.problems]
        return []


class SingleConfig(ParallelismConfig):
    """One process on one device."""

    name: Literal["single"] = "single"

    def mesh(self, world: int) -> Mesh:
        if world == 1:
            return Mesh(1, 1)
        text = f"parallelism=single runs one process, not {world}; set launch.devices=1, or parallelism=ddp"
        raise SpecError([Problem("launch.devices", text)])


class MeshConfig(ParallelismConfig):
    """Several processes, one per device, on a grid of dp_replicate × dp_shard × tp."""

    dp_replicate: int = Field(default=1, ge=-1, description="Whole copies of the model; -1 = what the rest leaves.")
    dp_shard: int = Field(
        default=1,
        ge=-1,
        description="Parts in which a copy's weights lie on as many devices; -1 = what the rest leaves.",
    )
    tp: int = Field(
        default=1,
        ge=-1,
        description="Slices in which each layer lies on as many devices, which compute it together (tensor "
        "parallelism); divides the heads; -1 = what the rest leaves.",
    )
    timeout_s: float = Field(
        default=1800.0, gt=0, description="Seconds that a rank waits for the others before the job ends with an error."
    )

    def mesh(self, world: int) -> Mesh:
        """See `ParallelismConfig`."""
        own, sizes = f"parallelism={self.name}", (self.dp_replicate, self.dp_shard, self.tp)
        if self.dp_shard != 1 and not isinstance(self, ShardedConfig):
            text = f"{own} keeps whole copies; type parallelism=fsdp, or hsdp, for parts of them"
            raise SpecError([Problem("parallelism.dp_shard", text)])
        if world == 1:
            text = f"{own} shares the work out, and there is one process; type launch.devices=N, one for each device"
            raise SpecError([Problem("launch.devices", f"{text} (on the CPU as you like), or parallelism=single")])
        if 0 in sizes or sizes.count(-1) > 1:
            said = ", ".join(f"{name}={n}" for name, n in zip(Mesh._fields, sizes, strict=True))
            text = f"{own} with {said}; give sizes from 1, and at most one -1"
            raise SpecError([Problem("parallelism.dp_replicate", text)])
        known = prod(n for n in sizes if n != -1)
        if world % known or (-1 not in sizes and world != known):
            product = " × ".join(f"{name}={n}" for name, n in zip(Mesh._fields, sizes, strict=True))
            text = f"{product} does not make {world} processes (launch); {self._instead(world)}"
            raise SpecError([Problem("parallelism", text)])
        return Mesh(*(world // known if n == -1 else n for n in sizes))

    def _instead(self, world: int) -> str:
        """What would fit: what is 1 stays so if it can."""
        sizes = [n for n in range(1, world + 1) if world % n == 0]
        grids = [Mesh(a, b, world // (a * b)) for a in sizes for b in sizes if world % (a * b) == 0]
        for at, said in enumerate((self.dp_replicate, self.dp_shard, self.tp)):
            grids = [grid for grid in grids if said != 1 or grid[at] == 1] or grids
        return f"what fits, {' × '.join(Mesh._fields)}: " + ", ".join(" × ".join(map(str, grid)) for grid in grids)

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if found := super().problems(job):
            return found
        mesh = self.mesh(job.launch.world)
        if mesh.tp > 1 and getattr(job.adapter, "dora", False):
            text = "its norms are over whole layers, which tensor parallelism cuts; leave it out"
            found.append(("adapter.dora", text))
        return found + [(p.key, p.message) for p in self.uneven(mesh, job.model.divided())]

    def uneven(self, mesh: Mesh, divided: Mapping[str, int]) -> list[Problem]:
        """What of a model, by name, does not divide into the mesh's slices, with what would fit."""
        found = [f"{name}={size}" for name, size in divided.items() if size % mesh.tp]
        if not found:
            return []
        most = gcd(*divided.values())
        fitting = [n for n in range(1, most + 1) if most % n == 0]
        text = f"{mesh.tp} slices do not divide {', '.join(found)} of the model"
        return [Problem("parallelism.tp", f"{text}; what fits: {', '.join(map(str, fitting))}")]


class DdpConfig(MeshConfig):
    """Every process has the whole model and does its share of each step."""

    name: Literal["ddp"] = "ddp"
    dp_replicate: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_replicate"].description)


class ShardedConfig(MeshConfig):
    """Weights, gradients and optimizer state lie in parts on several devices; layers are gathered for their turn."""

    reshard_after_forward: bool = Field(
        default=True,
        description="Free a layer's gathered weights after its forward pass and gather them again for its backward "
        "pass: less memory, half as much communication again.",
    )
    cpu_offload: bool = Field(
        default=False,
        description="Keep the parts, and the optimizer's step on them, in the host's memory: less on the device, slow.",
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.cpu_offload and job.device.name == "cpu":
            found.append(("parallelism.cpu_offload", "device=cpu computes in the host's memory already; leave it out"))
        return found


class FsdpConfig(ShardedConfig):
    """One copy of the model in parts on all devices (torch's fully_shard)."""

    name: Literal["fsdp"] = "fsdp"
    dp_shard: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_shard"].description)


class HsdpConfig(ShardedConfig):
    """Several copies of the model, each in parts on as many devices (torch's fully_shard)."""

    name: Literal["hsdp"] = "hsdp"
    dp_replicate: int = Field(default=2, ge=-1, description=MeshConfig.model_fields["dp_replicate"].description)
    dp_shard: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_shard"].description)


class TpConfig(MeshConfig):
    """Each layer lies in slices on all devices, which compute it together."""

    name: Literal["tp"] = "tp"
    tp: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["tp"].description)


COMPONENTS = (SingleConfig, DdpConfig, FsdpConfig, HsdpConfig, TpConfig)
