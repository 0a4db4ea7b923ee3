"""What a user can set of a device."""

import glob
import importlib.util
import os
from typing import ClassVar, Literal

from pydantic import Field

from runner.errors import EnvironmentProblem
from runner.spec.base import ComponentConfig


class DeviceConfig(ComponentConfig):
    """Where tensors live and which kernels run."""

    group: ClassVar[str] = "device"

    deterministic: bool = Field(
        default=True, description="Ask torch for deterministic kernels; needed for exact resume."
    )

    def preflight(self) -> None:
        """Raise EnvironmentProblem if the device cannot work; answers without importing torch."""


class CpuConfig(DeviceConfig):
    """The processor: the embedded default, on which everything can be tried."""

    factory: ClassVar[str] = "runner.device.cpu:Cpu"
    name: Literal["cpu"] = "cpu"
    threads: int = Field(
        default=1, ge=1, description="Intra-op threads of torch; 1 is fastest for tiny models, and bits depend on it."
    )


class CudaConfig(DeviceConfig):
    """One or more NVIDIA GPUs."""

    factory: ClassVar[str] = "runner.device.cuda:Cuda"
    name: Literal["cuda"] = "cuda"
    tf32: bool = Field(default=False, description="Let float32 matrix products run in TF32: faster, about 3 digits.")


class NpuConfig(DeviceConfig):
    """One or more Huawei Ascend NPUs (needs CANN and torch_npu)."""

    factory: ClassVar[str] = "runner.device.npu:Npu"
    name: Literal["npu"] = "npu"

    def preflight(self) -> None:
        """Raise EnvironmentProblem with everything that is missing, in the order in which to install it."""
        missing = [todo for present, todo in _npu_requirements() if not present]
        if missing:
            steps = "\n".join(f"  {number}. {todo}" for number, todo in enumerate(missing, 1))
            raise EnvironmentProblem(
                f"device=npu: this machine is not ready for an Ascend NPU; in this order:\n{steps}\n"
                "  or run it here: device=cpu model=tiny data=demo"
            )


def _npu_requirements() -> list[tuple[bool, str]]:
    toolkit = os.environ.get("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/ascend-toolkit/latest")
    return [
        (
            bool(glob.glob("/dev/davinci[0-9]*")),
            "no card: /dev/davinci* is missing (driver and firmware, or the container's --device mounts)",
        ),
        (os.path.isdir(toolkit), f"no CANN toolkit at {toolkit}: install it"),
        ("ASCEND_TOOLKIT_HOME" in os.environ, f"CANN's environment is not loaded: source {toolkit}/../set_env.sh"),
        (
            importlib.util.find_spec("torch_npu") is not None,
            "no torch_npu: pip install the torch_npu whose version equals torch's",
        ),
    ]


class AutoConfig(DeviceConfig):
    """The best device present: npu before cuda before cpu; the choice is printed."""

    factory: ClassVar[str] = "runner.device.auto:pick"
    name: Literal["auto"] = "auto"


COMPONENTS = (CpuConfig, CudaConfig, NpuConfig, AutoConfig)
