"""The simulated NPU as a device: the NPU's own code, on torch_npu without a card."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from npu_simulator import process, register
from npu_simulator.config import NpuSimConfig
from runner.core.errors import EnvironmentProblem
from runner.device.base import process_stats_reader, refuse_hidden
from runner.device.device_stats import StatsReader
from runner.device.npu import Npu
from runner.interfaces import Decide


class NpuSim(Npu):
    """One of the simulated cards of this process. Raises EnvironmentProblem where they cannot be made."""

    name = "npu_sim"

    def __init__(self, config: NpuSimConfig, *, decide: Decide) -> None:
        config.enter()
        parts = process.entered()
        assert parts is not None
        _import_torch_npu()
        refuse_hidden(config.kind, torch.npu.device_count())  # type: ignore[attr-defined]
        replaced = register.install(parts.built)
        super().__init__(config, decide=decide)
        card = torch.npu.get_device_name()  # type: ignore[attr-defined]
        memory = f"{config.cards} x {card}, {config.memory_gib:g} GiB each"
        decide.record_fact("device", "npu_sim", f"torch_npu without a card: {memory}; {replaced} kernels are the CPU's")

    def prepare(self) -> None:
        """Determinism as on a card; and one thread, on which the bits depend, and which is fastest at toy size."""
        super().prepare()
        torch.set_num_threads(1)

    def stats_readers(self) -> Sequence[StatsReader]:
        """Of this process, which does the work, and of the allocator of the simulated card."""
        return process_stats_reader(), self.allocator

    def describe(self) -> dict[str, Any]:
        """What exactness depends on: the CPU's kernels, too."""
        return {
            **super().describe(),
            "device": "npu_sim",
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


def _import_torch_npu() -> None:
    """Raises EnvironmentProblem where it refuses, as it does beside a GPU that torch sees."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own, at its import
            import torch_npu  # noqa: F401
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        advice = "beside a GPU, hide it: CUDA_VISIBLE_DEVICES= run ..."
        raise EnvironmentProblem(f"device=npu_sim: torch_npu cannot be imported: {reason}\n  {advice}") from error
