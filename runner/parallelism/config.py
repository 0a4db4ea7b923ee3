"""How one job is spread over devices: one schema, whose names are presets."""

import importlib.util
from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.parallelism.mesh import Mesh, Sizes, divisibility_problems, fit_mesh
from runner.spec.base import ComponentConfig


class ParallelismConfig(ComponentConfig):
    """The device mesh of the trainer."""

    group: ClassVar[str] = "parallelism"
    factory: ClassVar[str] = "runner.parallelism.parallel_context:build"
    deepspeed: ClassVar[bool] = False  # whether DeepSpeed keeps gradients and optimizer state
    shards: ClassVar[bool] = False  # whether weights lie in pieces on several devices

    @property
    def deadline_s(self) -> float | None:
        """Seconds that a rank waits for the others; None where there is one."""
        return None

    @property
    def context_style(self) -> Literal["ulysses", "ring"] | None:
        """How context-parallel ranks exchange what attention needs; None = the job chooses."""
        return None

    @property
    def stage_chunks(self) -> int:
        """Runs of layers on each pipeline rank."""
        return 1

    @property
    def offloads(self) -> bool:
        """Whether shards, and the optimizer's step on them, are in the host's memory."""
        return False

    @property
    def reshards(self) -> bool:
        """Whether a layer's gathered weights are freed after its forward pass."""
        return False

    def divisibility_problems(self, mesh: Mesh, sizes: Sizes) -> list[Problem]:
        """What of a model does not divide as the mesh needs it, with what would fit."""
        return []

    def mesh(self, world: int) -> Mesh:
        """The grid of `world` ranks. Raises SpecError, with what would fit, where there is none."""
        raise NotImplementedError

    def preflight(self) -> None:
        """Raise EnvironmentProblem where a package is missing that it needs."""

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
            return Mesh()
        text = f"parallelism=single runs one process, not {world}; set launch.devices=1, or parallelism=ddp"
        raise SpecError([Problem("launch.devices", text)])


class MultiProcessConfig(ParallelismConfig):
    """Several processes, one per device."""

    timeout_s: float = Field(
        default=1800.0, gt=0, description="Seconds that a rank waits for the others before the job ends with an error."
    )

    @property
    def deadline_s(self) -> float | None:
        return self.timeout_s

    def _refuse_single_process(self, world: int) -> None:
        if world == 1:
            own = f"parallelism={self.name}"
            text = f"{own} shares the work out, and there is one process; type parallelism=single for one device, or "
            raise SpecError([Problem("launch.devices", f"{text}launch.devices=N for N (on the CPU as you like)")])


class MeshConfig(MultiProcessConfig):
    """Several processes, one per device, on a grid of pp × dp_replicate × dp_shard × cp × tp."""

    pp: int = Field(
        default=1,
        ge=-1,
        description="Stages, runs of layers, through which micro-batches pass one after the other (pipeline "
        "parallelism); -1 = what the rest leaves.",
    )
    dp_replicate: int = Field(default=1, ge=-1, description="Whole copies of the model; -1 = what the rest leaves.")
    dp_shard: int = Field(
        default=1,
        ge=-1,
        description="Parts in which a copy's weights lie on as many devices; -1 = what the rest leaves.",
    )
    cp: int = Field(
        default=1,
        ge=-1,
        description="Devices that each have some of the tokens of every micro-batch (context parallelism), for long "
        "rows; -1 = what the rest leaves.",
    )
    tp: int = Field(
        default=1,
        ge=-1,
        description="Slices in which each layer lies on as many devices, which compute it together (tensor "
        "parallelism); divides the heads; -1 = what the rest leaves.",
    )
    ep: int = Field(
        default=1,
        ge=-1,
        description="Over how many of the data-parallel and cp ranks the experts of a layer lie, to which tokens "
        "travel (expert parallelism); -1 = all of them.",
    )
    cp_backend: Literal["ulysses", "ring"] | None = Field(
        default=None,
        description="How cp ranks attend: each to some heads of all tokens (ulysses), or each for its own tokens as "
        "keys and values go round (ring); null = ulysses where cp divides the heads of a slice.",
    )
    pp_virtual_stages: int = Field(
        default=1,
        ge=1,
        description="Runs of layers on each pp rank; more than one are interleaved: less waiting, more messages.",
    )

    @property
    def context_style(self) -> Literal["ulysses", "ring"] | None:
        return self.cp_backend

    @property
    def stage_chunks(self) -> int:
        return self.pp_virtual_stages

    def mesh(self, world: int) -> Mesh:
        """See `ParallelismConfig`."""
        own = f"parallelism={self.name}"
        if self.dp_shard != 1 and not self.shards:
            text = f"{own} keeps whole copies; type parallelism=fsdp, or hsdp, for parts of them"
            raise SpecError([Problem("parallelism.dp_shard", text)])
        self._refuse_single_process(world)
        return fit_mesh(self._sizes(), world, own)

    def _sizes(self) -> dict[str, int]:
        grid = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        return grid | {"cp": self.cp, "tp": self.tp, "ep": self.ep}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if found := super().problems(job):
            return found
        mesh = self.mesh(job.launch.world)
        if mesh.tp > 1 and (option := job.adapter.needs_whole_layers):
            text = "its norms are over whole layers, which tensor parallelism cuts; leave it out"
            found.append((option, text))
        if mesh.cp > 1 and job.model.batch_layout == "padded":
            text = f"the rows that parallelism.cp={mesh.cp} shares out lie end to end; leave it out"
            found.append(("model.batch_layout", text))
        found += self._unused_options(mesh) + self._teacher_conflicts(job)
        return found + [(p.key, p.message) for p in self.divisibility_problems(mesh, job.model.sizes())]

    def _unused_options(self, mesh: Mesh) -> list[tuple[str, str]]:
        """Options that mean nothing on this mesh."""
        found = []
        if self.cp_backend is not None and mesh.cp == 1:
            found.append(("parallelism.cp_backend", "there is one cp rank; type parallelism.cp=N, or leave it out"))
        if self.pp_virtual_stages > 1 and mesh.pp == 1:
            found.append(
                ("parallelism.pp_virtual_stages", "there is one stage; type parallelism.pp=N, or leave it out")
            )
        return found

    def _teacher_conflicts(self, job: Any) -> list[tuple[str, str]]:
        """Problems of a teacher's passes with interleaved pipeline stages, whose order of passes differs."""
        if self.pp_virtual_stages > 1 and job.algorithm.scores_within_passes:
            return [("parallelism.pp_virtual_stages", "distill asks its teacher between its own passes; leave it out")]
        return []

    def divisibility_problems(self, mesh: Mesh, sizes: Sizes) -> list[Problem]:
        return divisibility_problems(mesh, sizes, chunks=self.pp_virtual_stages, ulysses=self.cp_backend == "ulysses")


class DdpConfig(MeshConfig):
    """Every process has the whole model and does its share of each step."""

    name: Literal["ddp"] = "ddp"
    dp_replicate: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_replicate"].description)


class ShardedConfig(MeshConfig):
    """FSDP: weights, gradients and optimizer state are sharded; layers are gathered when they compute."""

    shards: ClassVar[bool] = True

    reshard_after_forward: bool = Field(
        default=True,
        description="Free a layer's gathered weights after its forward pass and gather them again for its backward "
        "pass: less memory, half as much communication again.",
    )
    cpu_offload: bool = Field(
        default=False,
        description="Keep the parts, and the optimizer's step on them, in the host's memory: less on the device, slow.",
    )

    @property
    def offloads(self) -> bool:
        return self.cpu_offload

    @property
    def reshards(self) -> bool:
        return self.reshard_after_forward

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.cpu_offload and job.device.is_cpu:
            found.append(("parallelism.cpu_offload", "device=cpu computes in the host's memory already; leave it out"))
        elif self.cpu_offload and not found and _has_whole_experts(self.mesh(job.launch.world)):
            text = "experts that are in no pieces stay on their device; leave it out, or type a smaller parallelism.ep"
            found.append(("parallelism.cpu_offload", text))
        return found


def _has_whole_experts(mesh: Mesh) -> bool:
    """Whether there is nothing left over which a rank's experts could lie in pieces."""
    return mesh.ep > 1 and mesh.expert_grid["dp_shard"] == 1


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


class CpConfig(MeshConfig):
    """Each device has some of the tokens of every micro-batch, and the whole model."""

    name: Literal["cp"] = "cp"
    cp: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["cp"].description)


class PpConfig(MeshConfig):
    """Each device has a run of the layers; micro-batches pass from one to the next."""

    name: Literal["pp"] = "pp"
    pp: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["pp"].description)


class EpConfig(MeshConfig):
    """Expert parallel: each device has some experts of each layer, and a replica of everything else."""

    name: Literal["ep"] = "ep"
    dp_replicate: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_replicate"].description)
    ep: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["ep"].description)


class ZeroConfig(MultiProcessConfig):
    """DeepSpeed's ZeRO, from an extra."""

    deepspeed: ClassVar[bool] = True
    stage: ClassVar[int]

    def mesh(self, world: int) -> Mesh:
        """See `ParallelismConfig`: how DeepSpeed spreads what it keeps is its own."""
        self._refuse_single_process(world)
        return Mesh(dp_replicate=world)

    def preflight(self) -> None:
        """See `ParallelismConfig`."""
        if importlib.util.find_spec("deepspeed") is None:
            text = f"parallelism={self.name} needs DeepSpeed; without it parallelism=fsdp does the same"
            raise EnvironmentProblem(f'{text}\n  pip install "posttrain-run[deepspeed]"')

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        own = f"parallelism={self.name}"
        if not job.device.deepspeed:
            found.append(("device.name", f"{own} knows no device={job.device.name}; type parallelism=fsdp"))
        if self.stage == 3 and job.model.dtype == "bfloat16" and not job.adapter.trains_base:
            text = f"{own} finds other gradients beside a base in bfloat16; type parallelism=fsdp, or deepspeed_zero2"
            found.append(("model.dtype", text))
        if self.stage == 2 and len(job.algorithm.trained_models()) > 1:
            text = f"two models that learn did not end under {own}; type parallelism=ddp, or deepspeed_zero3"
            found.append(("algorithm.name", text))
        if job.model.compile:
            found.append(("model.compile", f"not tried under {own}; leave it out, or type parallelism=fsdp"))
        return found


class Zero2Config(ZeroConfig):
    """DeepSpeed's ZeRO-2: gradients and optimizer state in parts on all devices, the whole model on each."""

    name: Literal["deepspeed_zero2"] = "deepspeed_zero2"
    stage = 2


class Zero3Config(ZeroConfig):
    """DeepSpeed's ZeRO-3: weights, gradients and optimizer state in parts on all devices."""

    name: Literal["deepspeed_zero3"] = "deepspeed_zero3"
    stage = 3


COMPONENTS = (
    SingleConfig,
    DdpConfig,
    FsdpConfig,
    HsdpConfig,
    TpConfig,
    CpConfig,
    PpConfig,
    EpConfig,
    Zero2Config,
    Zero3Config,
)
