"""Huawei Ascend NPUs as a device."""

from __future__ import annotations

from typing import Any

import torch

from runner.device.config import NpuConfig
from runner.errors import EnvironmentProblem
from runner.protocols import Decide


class Npu:
    """One Ascend NPU of this process, through `torch.accelerator` wherever that is enough.

    Raises EnvironmentProblem where torch_npu finds no card.
    """

    name = "npu"

    def __init__(self, config: NpuConfig, *, decide: Decide) -> None:
        import torch_npu  # noqa: F401  registers the device with torch

        current = torch.accelerator.current_accelerator()
        if current is None or current.type != "npu":
            raise EnvironmentProblem("device=npu: torch_npu is installed and finds no card; npu-smi info must list one")
        self.config = config
        self.torch_device = torch.device("npu", torch.accelerator.current_device_index())

    def prepare(self) -> None:
        """Choose determinism."""
        torch.set_deterministic_debug_mode("error" if self.config.deterministic else "default")

    def synchronize(self) -> None:
        """Wait for the NPU, so that times mean something."""
        torch.accelerator.synchronize()

    def peak_memory_bytes(self) -> int:
        """Largest number of bytes that tensors held so far."""
        return int(torch.accelerator.max_memory_allocated())

    def describe(self) -> dict[str, Any]:
        """What exactness depends on."""
        return {"device": "npu", "index": self.torch_device.index}
