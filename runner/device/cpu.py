"""The processor as a device."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from runner.device.base import TorchDevice, process_stats_reader
from runner.device.config import CpuConfig
from runner.interfaces import Decide

if TYPE_CHECKING:
    from runner.device.device_stats import StatsReader


class Cpu(TorchDevice[CpuConfig]):
    """The processor, with a fixed number of threads, because bits depend on it."""

    name = "cpu"

    def __init__(self, config: CpuConfig, *, decide: Decide) -> None:
        super().__init__(config, torch.device("cpu"), decide)

    def prepare(self) -> None:
        """Fix what results depend on."""
        torch.set_num_threads(self.config.threads)
        super().prepare()

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

    def stats_readers(self) -> Sequence[StatsReader]:
        """Of this process."""
        return (process_stats_reader(),)
