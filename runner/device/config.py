"""The options of devices."""

import glob
import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.core.device_kinds import CPU, CUDA, NPU, Kind, listed_cards, present_cards
from runner.core.errors import EnvironmentProblem
from runner.device.process_setup import CUDA_DETERMINISTIC, PRESETS, Preset, engine_presets, hccl_port_presets
from runner.spec.base import ComponentConfig, Dtype

Attention = Literal["fused", "sdpa"]
Fused = Literal["rms_norm", "rotary", "swiglu", "grouped_matmul"]
ON_CARD: Any = Field(
    default=False, description="Use only deterministic kernels, or fail; slower, without exact resume."
)


class DeviceConfig(ComponentConfig):
    """The device of tensors and kernels."""

    group: ClassVar[str] = "device"
    is_cpu: ClassVar[bool] = False  # whether it is the CPU, which uses host memory
    is_auto: ClassVar[bool] = False  # whether the device is chosen where the job runs
    deepspeed: ClassVar[bool] = False  # whether DeepSpeed supports it
    checks: ClassVar[str | None] = None
    """Checks of `run doctor device=NAME`, as "module:attribute": (name, function from Machine to Finding) pairs;
    None = the doctor's own."""

    deterministic: bool | None = Field(
        default=None, description="Use only deterministic kernels, or fail; null = true for cpu, false for cards."
    )

    @property
    def default_dtype(self) -> Dtype:
        """The compute dtype of a model without `model.dtype`."""
        return self.kind.dtype

    @property
    def float32_peak(self) -> str | None:
        """The peak in float32 relative to that in bfloat16, as text; None = unknown."""
        return None

    @property
    def kind(self) -> Kind:
        """The kind of device: its names in drivers, torch, Slurm and Ray."""
        return CPU

    @property
    def occupies(self) -> Kind:
        """The resources that a job requests: cards of its kind; cores for simulated cards."""
        return self.kind

    @property
    def compiles_for(self) -> str | None:
        """The type of torch device that layers are compiled for without `model.compile`; None = none."""
        return None

    @property
    def numerics_options(self) -> dict[str, Any]:
        """The options that change results by more than the composition of a batch does."""
        return self.model_dump(mode="json", exclude={"name", "threads", "env_preset"})

    def quantization_problem(self) -> str | None:
        """Why a base cannot be quantized there; None = it can."""
        return None

    def liger_problem(self) -> str | None:
        """Why Liger's kernels (`model.kernels`) cannot run there; None = they can."""
        return "its Triton kernels need an NVIDIA GPU; leave it out, or type device=cuda"

    @property
    def host_threads(self) -> int:
        """Number of cores that one process uses."""
        return 1

    @property
    def fused_operators(self) -> tuple[str, ...]:
        """The operators of a model that the device replaces by fused ones."""
        return ()

    def visible(self) -> tuple[str, ...] | None:
        """The visible cards by their names in the environment; None on the CPU.

        Any number of ranks share a CPU. Does not import torch. Raises EnvironmentProblem for an invalid list.
        """
        return None if self.kind.nodes is None else present_cards(self.kind)

    def preflight(self) -> None:
        """Raise EnvironmentProblem if the device cannot work; does not import torch."""

    def matmul_precision(self, dtype: str) -> str:
        """The precision of matrix products of tensors of `dtype`: a dtype, or tf32."""
        return dtype

    def environment(self, job: Any) -> Sequence[Preset]:
        """Environment variables of a job on this device, to set before torch is imported."""
        return ()

    def enter(self) -> None:
        """Prepare this process for the device before torch is imported. Raises EnvironmentProblem."""

    def simulator(self, cards: int) -> "DeviceConfig | None":
        """This device with simulated cards, for the doctor's tests; None for a real device."""
        return None


class CpuConfig(DeviceConfig):
    """The CPU: the default of conf/job.yaml; most features can be tried on it."""

    factory: ClassVar[str] = "runner.device.cpu:Cpu"
    name: Literal["cpu"] = "cpu"
    is_cpu: ClassVar[bool] = True
    deepspeed: ClassVar[bool] = True
    deterministic: bool = Field(
        default=True, description="Use only deterministic kernels, or fail; needed for exact resume."
    )
    threads: int = Field(
        default=1, ge=1, description="Intra-op threads of torch; 1 is fastest for tiny models. Changes the last bits."
    )

    @property
    def host_threads(self) -> int:
        return self.threads

    def environment(self, job: Any) -> Sequence[Preset]:
        return engine_presets(job, threads=self.threads)


class CudaConfig(DeviceConfig):
    """One or more NVIDIA GPUs."""

    factory: ClassVar[str] = "runner.device.cuda:Cuda"
    name: Literal["cuda"] = "cuda"
    deepspeed: ClassVar[bool] = True
    deterministic: bool = ON_CARD
    attention: Attention = Field(
        default="fused",
        description="Attention of packed batches: fused = one flash kernel call; sdpa = torch's, by sequence length.",
    )
    tf32: bool = Field(default=True, description="Allow TF32 in float32 matrix products: faster, about 3 digits.")

    @property
    def kind(self) -> Kind:
        return CUDA

    @property
    def compiles_for(self) -> str:
        return "cuda"

    def matmul_precision(self, dtype: str) -> str:
        return "tf32" if dtype == "float32" and self.tf32 else dtype

    @property
    def float32_peak(self) -> str:
        reached = "1/2 of the peak in bfloat16 (TF32)" if self.tf32 else "1/15 of the peak in bfloat16"
        return f"at most {reached} on an A100, H100 or H200, and no flash kernel"

    def liger_problem(self) -> str | None:
        return None

    def preflight(self) -> None:
        """Raise EnvironmentProblem naming everything that is missing.

        On WSL a GPU has no device file: nvidia-smi is enough.
        """
        torch = importlib.util.find_spec("torch")
        version = Path(torch.origin or "").with_name("version.py") if torch is not None else Path()
        built = version.read_text(encoding="utf-8") if version.is_file() else ""
        is_cpu_build = "\ncuda: Optional[str] = None" in built and "\nhip: Optional[str] = '" not in built
        is_here = glob.glob(str(CUDA.nodes)) or shutil.which("nvidia-smi")
        missing = [] if is_here else ["no GPU (/dev/nvidia*, nvidia-smi)"]
        missing += [] if listed_cards(CUDA) != () else [f"{CUDA.visible} is set but empty"]
        missing += ["this torch is a CPU build"] if is_cpu_build else []
        _refuse_missing("cuda", "an NVIDIA GPU", missing)

    def environment(self, job: Any) -> Sequence[Preset]:
        return (*((CUDA_DETERMINISTIC,) if self.deterministic else ()), *engine_presets(job))


class NpuConfig(DeviceConfig):
    """One or more Huawei Ascend NPUs (needs CANN and torch_npu)."""

    factory: ClassVar[str] = "runner.device.npu:Npu"
    name: Literal["npu"] = "npu"
    deepspeed: ClassVar[bool] = True
    deterministic: bool = ON_CARD
    attention: Attention = Field(
        default="fused",
        description="fused = npu_fusion_attention, for packed and padded batches; sdpa = torch's, by sequence length.",
    )
    fused_ops: Annotated[tuple[Fused, ...], Field(strict=False)] = Field(
        default=("rms_norm", "rotary", "swiglu", "grouped_matmul"),
        description="Fused operators for Qwen2, Qwen2.5, Qwen3, Qwen3-MoE and Llama models; [] = none.",
    )
    env_preset: Literal["train", "colocated_rl", "disaggregated_rl", "debug"] | None = Field(
        default=None,
        description="Preset of environment variables; null = colocated_rl for a job that samples, disaggregated_rl "
        "with launch.samplers, else train.",
    )

    def quantization_problem(self) -> str | None:
        return "bitsandbytes 0.50.2 has no kernels for an NPU"

    def liger_problem(self) -> str | None:
        text = "its Triton kernels do not run with torch_npu, and an NPU has fused operators of its own"
        return f"{text} (device.fused_ops); leave it out"

    @property
    def fused_operators(self) -> tuple[str, ...]:
        return self.fused_ops

    @property
    def kind(self) -> Kind:
        return NPU

    @property
    def float32_peak(self) -> str:
        return "about 1/4 of the peak in bfloat16 on a 910B"

    def environment(self, job: Any) -> Sequence[Preset]:
        sampling = "disaggregated_rl" if job.launch.samplers else "colocated_rl"
        chosen = self.env_preset or (sampling if job.algorithm.needs_sampler else "train")
        names = (chosen, "deterministic") if self.deterministic else (chosen,)
        return (*(PRESETS[name] for name in names), *hccl_port_presets(os.environ), *engine_presets(job))

    def preflight(self) -> None:
        """Raise EnvironmentProblem naming everything that is missing."""
        _refuse_missing("npu", "an Ascend NPU", _npu_missing())


def _refuse_missing(device: str, what: str, missing: Sequence[str]) -> None:
    if missing:
        raise EnvironmentProblem(
            f"device={device}: this machine is not ready for {what}: {'; '.join(missing)}\n"
            f"  for the steps to fix it, type: run doctor device={device}"
        )


def _npu_missing() -> list[str]:
    """What this machine lacks for an NPU, in the order in which to install it."""
    from runner.device.ascend import HOME_VARIABLES, install_folders, toolkit_folders

    needed = {
        "no card (/dev/davinci*)": bool(glob.glob(str(NPU.nodes))),
        f"no CANN in {' or '.join(install_folders(os.environ))}": any(True for _ in toolkit_folders(os.environ)),
        "CANN's environment is not loaded": any(os.environ.get(name) for name in HOME_VARIABLES),
        "no torch_npu": importlib.util.find_spec("torch_npu") is not None,
    }
    return [text for text, is_there in needed.items() if not is_there]


class AutoConfig(DeviceConfig):
    """The best device present: npu before cuda before cpu; the choice is printed."""

    factory: ClassVar[str] = "runner.device.auto:pick"
    name: Literal["auto"] = "auto"
    is_auto: ClassVar[bool] = True
    deepspeed: ClassVar[bool] = True

    @property
    def float32_peak(self) -> str | None:
        """That of the device that will probably be chosen."""
        return self._likely_device().float32_peak

    def matmul_precision(self, dtype: str) -> str:
        """That of the device that will probably be chosen."""
        return self._likely_device().matmul_precision(dtype)

    @property
    def kind(self) -> Kind:
        """The kind of device that will probably be chosen; it is known after torch is imported."""
        return self._likely_device().kind

    @property
    def compiles_for(self) -> str:
        """The device is chosen where the job runs; cuda alone compiles by default."""
        return "cuda"

    @property
    def numerics_options(self) -> dict[str, Any]:
        """Those of the device that will probably be chosen."""
        return self._likely_device().numerics_options

    def quantization_problem(self) -> str | None:
        return self._likely_device().quantization_problem()

    def liger_problem(self) -> str | None:
        return self._likely_device().liger_problem()

    def environment(self, job: Any) -> Sequence[Preset]:
        """Those of the device that will probably be chosen."""
        return self._likely_device().environment(job)

    def _likely_device(self) -> DeviceConfig:
        if not _npu_missing():
            return NpuConfig.model_validate(self.picked_options)
        if glob.glob(str(CUDA.nodes)):
            return CudaConfig.model_validate(self.picked_options)
        return CpuConfig.model_validate(self.picked_options)

    @property
    def picked_options(self) -> dict[str, bool]:
        """Options for the chosen device."""
        return {} if self.deterministic is None else {"deterministic": self.deterministic}


COMPONENTS = (CpuConfig, CudaConfig, NpuConfig, AutoConfig)
