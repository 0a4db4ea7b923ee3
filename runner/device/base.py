"""What all devices have in common, through torch: a device of its own says what it does in another way."""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from runner.device.accelerator import allocator, use_deterministic
from runner.device.config import DeviceConfig
from runner.interfaces import Decide, DenseAttention, VarlenAttention

Settings = TypeVar("Settings", bound=DeviceConfig)


class TorchDevice(Generic[Settings]):
    """A card by `torch.accelerator`, with torch's own attention and nothing to exchange in a model."""

    name: str

    def __init__(self, config: Settings, torch_device: torch.device, decide: Decide) -> None:
        self.config, self._decide, self.torch_device = config, decide, torch_device
        self.backend = config.kind.backend
        self.allocator = partial(allocator, torch_device)

    def prepare(self) -> None:
        """Choose determinism."""
        use_deterministic(bool(self.config.deterministic))

    def synchronize(self) -> None:
        """Wait for the device, so that times mean something."""
        torch.accelerator.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int:
        """Largest number of bytes that tensors held so far."""
        return int(torch.get_device_module(self.torch_device).max_memory_allocated(self.torch_device))

    def matmul_precision(self, dtype: torch.dtype) -> str:
        """As the options say."""
        return self.config.matmul_precision(str(dtype).removeprefix("torch."))

    def lacks(self, dtype: torch.dtype) -> str | None:
        """Nothing."""
        return None

    def attention(self, dtype: torch.dtype) -> VarlenAttention | None:
        """None: one call of torch's kernel per row, which is fastest on the processor."""
        return None

    def dense_attention(self) -> DenseAttention | None:
        """None: transformers calls torch's, which chooses among its own."""
        return None

    def fuse(self, module: nn.Module) -> None:
        """Nothing to exchange."""
