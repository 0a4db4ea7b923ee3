"""How a job is distributed over devices: one schema, whose names are presets."""

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
    deepspeed: ClassVar[bool] = False  # whether DeepSpeed runs the optimizer
    shards: ClassVar[bool] = False  # whether weights are sharded over devices

    @property
    def deadline_s(self) -> float | None:
        """Timeout in seconds of collectives; None for a single process."""
        return None

    @property
    def context_style(self) -> Literal["ulysses", "ring"] | None:
        """The context-parallel backend; None = chosen by the job."""
        return None

    @property
    def stage_chunks(self) -> int:
        """Number of virtual stages on each pipeline rank."""
        return 1

    @property
    def offloads(self) -> bool:
        """Whether shards and the optimizer's step are in host memory."""
        return False

    @property
    def reshards(self) -> bool:
        """Whether a layer's gathered weights are freed after its forward pass."""
        return False

    def divisibility_problems(self, mesh: Mesh, sizes: Sizes) -> list[Problem]:
        """Sizes of a model that the mesh does not divide, with sizes that fit."""
        return []

    def mesh(self, world: int) -> Mesh:
        """The mesh of `world` ranks. Raises SpecError, with meshes that fit, if there is none."""
        raise NotImplementedError

    def preflight(self) -> None:
        """Raise EnvironmentProblem if a package is missing."""

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
        default=1800.0, gt=0, description="Timeout of collectives in seconds; after it the job ends with an error."
    )

    @property
    def deadline_s(self) -> float | None:
        return self.timeout_s

    def _refuse_single_process(self, world: int) -> None:
        if world == 1:
            own = f"parallelism={self.name}"
            text = f"{own} needs several processes; type parallelism=single for one device, or "
            raise SpecError([Problem("launch.devices", f"{text}launch.devices=N (any N on the CPU)")])


class MeshConfig(MultiProcessConfig):
    """Several processes, one per device, on a grid of pp × dp_replicate × dp_shard × cp × tp."""

    pp: int = Field(
        default=1,
        ge=-1,
        description="Number of stages that split the layers (pipeline parallel); -1 = all remaining ranks.",
    )
    dp_replicate: int = Field(
        default=1, ge=-1, description="Number of replicas (data parallel); -1 = all remaining ranks."
    )
    dp_shard: int = Field(default=1, ge=-1, description="Number of FSDP shards per replica; -1 = all remaining ranks.")
    cp: int = Field(
        default=1,
        ge=-1,
        description="Number of ranks that split the tokens of each micro-batch (context parallel), for long "
        "sequences; -1 = all remaining ranks.",
    )
    tp: int = Field(
        default=1,
        ge=-1,
        description="Number of ranks that split the matrices of each layer (tensor parallel); must divide the heads; "
        "-1 = all remaining ranks.",
    )
    ep: int = Field(
        default=1,
        ge=-1,
        description="Number of data-parallel and cp ranks that split the experts of a layer (expert parallel, "
        "all-to-all of tokens); -1 = all ranks; with sharding, all of one replica.",
    )
    cp_backend: Literal["ulysses", "ring"] | None = Field(
        default=None,
        description="Attention with cp > 1: ulysses = each rank has some heads of all tokens; ring = each rank has "
        "its tokens and receives keys and values. null = ulysses where cp divides the heads of a tp rank.",
    )
    pp_virtual_stages: int = Field(
        default=1,
        ge=1,
        description="Virtual stages per pp rank; above 1 = interleaved 1F1B: smaller bubble, more communication.",
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
            text = f"{own} does not shard weights; type parallelism=fsdp or parallelism=hsdp"
            raise SpecError([Problem("parallelism.dp_shard", text)])
        self._refuse_single_process(world)
        return fit_mesh({name: getattr(self, name) for name in Mesh._fields}, world, own)

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if found := super().problems(job):
            return found
        mesh = self.mesh(job.launch.world)
        if mesh.tp > 1 and (option := job.adapter.needs_whole_layers):
            text = "it needs norms of whole layers, which tensor parallelism splits; leave it out"
            found.append((option, text))
        if mesh.cp > 1 and job.model.batch_layout == "padded":
            text = f"parallelism.cp={mesh.cp} needs packed batches; leave it out"
            found.append(("model.batch_layout", text))
        found += self._unused_options(mesh)
        if mesh.pp > 1 and job.algorithm.micro_batch_tokens is None:
            text = "null asks what fits, and the stages of parallelism.pp need several micro-batches; type a number"
            found.append(("algorithm.micro_batch_tokens", text))
        if self.pp_virtual_stages > 1 and job.algorithm.scores_within_passes:  # in another order than its stages
            text = "distill runs its teacher between its own passes; leave it out"
            found.append(("parallelism.pp_virtual_stages", text))
        return found + [(p.key, p.message) for p in self.divisibility_problems(mesh, job.model.sizes())]

    def _unused_options(self, mesh: Mesh) -> list[tuple[str, str]]:
        """Errors for options that are not used on this mesh."""
        options = (
            ("cp_backend", "cp", self.cp_backend is not None),
            ("pp_virtual_stages", "pp", self.pp_virtual_stages > 1),
        )
        text = "not used with parallelism.{0}=1; type parallelism.{0}=N, or leave it out"
        unused = [(option, dim) for option, dim, is_set in options if is_set and getattr(mesh, dim) == 1]
        return [(f"parallelism.{option}", text.format(dim)) for option, dim in unused]

    def divisibility_problems(self, mesh: Mesh, sizes: Sizes) -> list[Problem]:
        return divisibility_problems(mesh, sizes, chunks=self.pp_virtual_stages, ulysses=self.cp_backend == "ulysses")


class DdpConfig(MeshConfig):
    """Data parallel (DDP): a replica of the model and a part of each batch on each device."""

    name: Literal["ddp"] = "ddp"
    dp_replicate: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_replicate"].description)


class ShardedConfig(MeshConfig):
    """FSDP: weights, gradients and optimizer state are sharded; layers are gathered when they compute."""

    shards: ClassVar[bool] = True

    reshard_after_forward: bool = Field(
        default=True,
        description="Free a layer's gathered weights after its forward pass and gather them again for the backward "
        "pass: less memory, 1.5 times the communication.",
    )
    cpu_offload: bool = Field(
        default=False,
        description="Keep shards and optimizer state in host memory and step there: less device memory, slow.",
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
            found.append(("parallelism.cpu_offload", "device=cpu already uses host memory; leave it out"))
        elif self.cpu_offload and not found and _has_whole_experts(self.mesh(job.launch.world)):
            text = "unsharded experts cannot be offloaded; leave it out, or type a smaller parallelism.ep"
            found.append(("parallelism.cpu_offload", text))
        return found


def _has_whole_experts(mesh: Mesh) -> bool:
    """Whether no ranks are left over which a rank's experts could be sharded."""
    return mesh.ep > 1 and mesh.expert_grid["dp_shard"] == 1


class FsdpConfig(ShardedConfig):
    """FSDP2 (fully_shard): weights, gradients and optimizer state are sharded over all devices."""

    name: Literal["fsdp"] = "fsdp"
    dp_shard: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_shard"].description)


class HsdpConfig(ShardedConfig):
    """Hybrid FSDP: several replicas of the model, each sharded over the same number of devices."""

    name: Literal["hsdp"] = "hsdp"
    dp_replicate: int = Field(default=2, ge=-1, description=MeshConfig.model_fields["dp_replicate"].description)
    dp_shard: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["dp_shard"].description)


class TpConfig(MeshConfig):
    """Tensor parallel: the matrices of each layer are split over all devices."""

    name: Literal["tp"] = "tp"
    tp: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["tp"].description)


class CpConfig(MeshConfig):
    """Context parallel: each device has some tokens of every micro-batch, and a replica of the model."""

    name: Literal["cp"] = "cp"
    cp: int = Field(default=-1, ge=-1, description=MeshConfig.model_fields["cp"].description)


class PpConfig(MeshConfig):
    """Pipeline parallel: each device has consecutive layers; micro-batches pass from stage to stage."""

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
        """See `ParallelismConfig`; DeepSpeed itself distributes its state."""
        self._refuse_single_process(world)
        return Mesh(dp_replicate=world)

    def preflight(self) -> None:
        """See `ParallelismConfig`."""
        if importlib.util.find_spec("deepspeed") is None:
            text = f"parallelism={self.name} needs DeepSpeed; parallelism=fsdp does the same without it"
            raise EnvironmentProblem(f'{text}\n  pip install "posttrain-run[deepspeed]"')

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        own = f"parallelism={self.name}"
        if not job.device.deepspeed:
            found.append(("device.name", f"{own} does not support device={job.device.name}; type parallelism=fsdp"))
        if self.stage == 3 and job.model.dtype == "bfloat16" and not job.adapter.trains_base:
            text = f"{own} computes wrong gradients with a bfloat16 base; type parallelism=fsdp, or deepspeed_zero2"
            found.append(("model.dtype", text))
        if self.stage == 2 and len(job.algorithm.trained_models()) > 1:
            text = f"two trained models hang under {own}; type parallelism=ddp, or deepspeed_zero3"
            found.append(("algorithm.name", text))
        return found


class Zero2Config(ZeroConfig):
    """DeepSpeed's ZeRO-2: gradients and optimizer state are sharded, weights are replicated."""

    name: Literal["deepspeed_zero2"] = "deepspeed_zero2"
    stage = 2


class Zero3Config(ZeroConfig):
    """DeepSpeed's ZeRO-3: weights, gradients and optimizer state are sharded."""

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
