"""NVIDIA GPUs as a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from runner.core.errors import EnvironmentProblem
from runner.device.accelerator import allocator, own_card, peak_bytes, use_deterministic
from runner.device.activity import Reading, gpu
from runner.device.config import CudaConfig
from runner.device.cuda_attention import kernel
from runner.interfaces import Decide, DenseAttention, VarlenAttention


class Cuda:
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
        self.config = config
        self._decide = decide
        self.torch_device = own_card(config.kind, torch.cuda.device_count())
        self.backend = config.kind.backend

    def prepare(self) -> None:
        """Choose precision and determinism."""
        use_deterministic(self.config.deterministic)
        torch.backends.cuda.matmul.allow_tf32 = self.config.tf32
        torch.backends.cudnn.allow_tf32 = self.config.tf32

    def synchronize(self) -> None:
        """Wait for the GPU, so that times mean something."""
        torch.cuda.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int:
        """Largest number of bytes that tensors held so far."""
        return peak_bytes(self.torch_device)

    def describe(self) -> dict[str, Any]:
        """What exactness depends on."""
        return {"device": "cuda", "card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}

    def readings(self) -> Sequence[Reading]:
        """Of the card as nvidia-smi sees it, and of this process's allocator."""
        uuid = str(torch.cuda.get_device_properties(self.torch_device).uuid)
        return gpu(uuid), partial(allocator, self.torch_device)

    def matmul_precision(self, dtype: torch.dtype) -> str:
        """As the options say."""
        return self.config.matmul_precision(str(dtype).removeprefix("torch."))

    def lacks(self, dtype: torch.dtype) -> str | None:
        """Nothing: what an old card does not have, torch computes in float32, which is said."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if dtype == torch.bfloat16 and major < 8:
            text = f"{torch.cuda.get_device_name(self.torch_device)} has compute capability {major}.{minor}"
            text = f"{text}; bfloat16 in hardware needs 8.0, and emulation is slow; model.dtype=float32 may be faster"
            self._decide.state("device", "bfloat16 is emulated", text)
        return None

    def attention(self, dtype: torch.dtype) -> VarlenAttention | None:
        """The flash kernel that is installed, for models that compute in float16 or bfloat16."""
        return kernel(self.config, dtype, self._decide)

    def dense_attention(self) -> DenseAttention | None:
        """None: transformers calls torch's, which chooses among its own."""
        return None

    def fuse(self, module: nn.Module) -> None:
        """Nothing to exchange."""
