"""The best device present: npu is tried before cuda, as a machine with NPUs may have a small GPU."""

from __future__ import annotations

import importlib.util

import torch

from runner.core.errors import EnvironmentProblem
from runner.device.config import AutoConfig, CpuConfig, CudaConfig, NpuConfig
from runner.device.cpu import Cpu
from runner.device.cuda import Cuda
from runner.interfaces import Decide, Device


def pick(config: AutoConfig, *, decide: Decide) -> Device:
    """Build the first device that is present, and print which one.

    Also prints where its data type differs from the one that a job without `model.dtype` was given.
    """
    own, device = _first_available(config, decide)
    if own.default_dtype != config.default_dtype:
        text = f"the default of model.dtype is that of device={config.kind.name}, whose device files exist here"
        decide("device", own.default_dtype, config.default_dtype, f"{text}; type device={own.name}, or model.dtype=…")
    return device


def _first_available(config: AutoConfig, decide: Decide) -> tuple[NpuConfig | CudaConfig | CpuConfig, Device]:
    """The first device that is there, and its options."""
    if importlib.util.find_spec("torch_npu") is not None:
        from runner.device.npu import Npu

        own = NpuConfig.model_validate(config.picked_options)
        try:
            npu = Npu(own, decide=decide)
        except (EnvironmentProblem, ImportError) as error:
            decide("device", "npu", "the next device", f"torch_npu is installed but cannot be used: {error}")
        else:
            decide("device", "auto", "npu", "torch_npu finds a card")
            return own, npu
    if torch.cuda.is_available():
        decide("device", "auto", "cuda", "torch finds a GPU")
        gpu = CudaConfig.model_validate(config.picked_options)
        return gpu, Cuda(gpu, decide=decide)
    decide("device", "auto", "cpu", "no accelerator found")
    cpu = CpuConfig.model_validate(config.picked_options)
    return cpu, Cpu(cpu, decide=decide)
