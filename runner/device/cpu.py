"""The processor as a device."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runner.device.accelerator import use_deterministic
from runner.device.activity import Reading, own_process
from runner.device.config import CpuConfig
from runner.interfaces import Decide, DenseAttention, VarlenAttention


class Cpu:
    """The processor, with a fixed number of threads, because bits depend on it."""

    name = "cpu"

    def __init__(self, config: CpuConfig, *, decide: Decide) -> None:
        self.config = config
        self.torch_device = torch.device("cpu")
        self.backend = config.kind.backend

    def prepare(self) -> None:
        """Fix what results depend on."""
        torch.set_num_threads(self.config.threads)
        use_deterministic(self.config.deterministic)

    def synchronize(self) -> None:
        """Nothing runs behind the processor's back."""

    def peak_memory_bytes(self) -> int:
        """Largest resident set of this process so far."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def describe(self) -> dict[str, Any]:
        """What exactness depends on, for the manifest and for resume."""
        return {
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }

    def readings(self) -> Sequence[Reading]:
        """Of this process."""
        return (own_process(),)

    def matmul_precision(self, dtype: torch.dtype) -> str:
        """As the options say."""
        return self.config.matmul_precision(str(dtype).removeprefix("torch."))

    def lacks(self, dtype: torch.dtype) -> str | None:
        """Nothing."""
        return None

    def attention(self, dtype: torch.dtype) -> VarlenAttention | None:
        """None: one call of torch's kernel per row is fastest here."""
        return None

    def dense_attention(self) -> DenseAttention | None:
        """None: transformers calls torch's, which chooses among its own."""
        return None

    def fuse(self, module: nn.Module) -> None:
        """Nothing to exchange."""
