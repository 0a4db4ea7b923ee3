"""The best device present: npu is asked before cuda, because a machine with NPUs may also carry a small GPU."""

from __future__ import annotations

import importlib.util

import torch

from runner.device.config import AutoConfig, CpuConfig, CudaConfig, NpuConfig
from runner.device.cpu import Cpu
from runner.device.cuda import Cuda
from runner.errors import EnvironmentProblem
from runner.protocols import Decide, Device


def pick(config: AutoConfig, *, decide: Decide) -> Device:
    """Build the first device that is there, and say which."""
    if importlib.util.find_spec("torch_npu") is not None:
        from runner.device.npu import Npu

        try:
            npu = Npu(NpuConfig.model_validate(config.given), decide=decide)
        except (EnvironmentProblem, ImportError) as error:
            decide("device", "npu", "the next one", f"torch_npu is installed and cannot be used: {error}")
        else:
            decide("device", "auto", "npu", "torch_npu finds a card")
            return npu
    if torch.cuda.is_available():
        decide("device", "auto", "cuda", "torch finds a GPU")
        return Cuda(CudaConfig.model_validate(config.given), decide=decide)
    decide("device", "auto", "cpu", "no accelerator found")
    return Cpu(CpuConfig.model_validate(config.given), decide=decide)
