"""NVIDIA GPUs as a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runner.core.errors import EnvironmentProblem
from runner.device.base import TorchDevice, select_card
from runner.device.config import CudaConfig
from runner.device.cuda_attention import varlen_kernel
from runner.device.device_stats import StatsReader, gpu_stats_reader
from runner.interfaces import Decide, VarlenAttention


class Cuda(TorchDevice[CudaConfig]):
    """One NVIDIA GPU of this process. Raises EnvironmentProblem where there is none."""

    name = "cuda"

    def __init__(self, config: CudaConfig, *, decide: Decide) -> None:
        if not torch.cuda.is_available():
            built = torch.version.cuda or "none: this is a CPU build of torch"
            raise EnvironmentProblem(
                f"device=cuda: torch {torch.__version__} sees no GPU (CUDA of the build: {built}).\n"
                "  in order: 1. nvidia-smi must list a GPU  2. CUDA_VISIBLE_DEVICES must not be empty  "
                "3. install a CUDA build of torch\n  or run it here: device=cpu"
            )
        super().__init__(config, select_card(config.kind, torch.cuda.device_count()), decide)

    def prepare(self) -> None:
        """Choose precision and determinism."""
        super().prepare()
        torch.backends.cuda.matmul.allow_tf32 = self.config.tf32
        torch.backends.cudnn.allow_tf32 = self.config.tf32

    def describe(self) -> dict[str, Any]:
        """What exactness depends on."""
        return {"device": "cuda", "card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}

    def stats_readers(self) -> Sequence[StatsReader]:
        """Of the card as nvidia-smi sees it, and of this process's allocator."""
        uuid = str(torch.cuda.get_device_properties(self.torch_device).uuid)
        return gpu_stats_reader(uuid), self.allocator

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        """Nothing: what an old card does not have, torch computes in float32, which is said."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if dtype == torch.bfloat16 and major < 8:
            text = f"{torch.cuda.get_device_name(self.torch_device)} has compute capability {major}.{minor}"
            text = f"{text}; bfloat16 in hardware needs 8.0, and emulation is slow; model.dtype=float32 may be faster"
            self._decide.record_fact("device", "bfloat16 is emulated", text)
        return None

    def varlen_attention(self, dtype: torch.dtype) -> VarlenAttention | None:
        """The flash kernel that is installed, for models that compute in float16 or bfloat16."""
        return varlen_kernel(self.config, dtype, self._decide)
