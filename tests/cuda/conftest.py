"""Tests with the marker `cuda` need a GPU: `make test-cuda` runs them, and no other command does.

Where a test takes `device`, its body also runs on the processor, among all other tests.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
import transformers

from runner.core.auto_choices import Decisions
from runner.device.config import CpuConfig, CudaConfig
from runner.device.cpu import Cpu
from runner.device.cuda import Cuda
from runner.interfaces import Device
from tests.conftest import CARDS

CAPABILITY = (8, 0)  # Ampere: the first that computes in bfloat16
NEEDED = "make test-cuda needs one NVIDIA GPU of compute capability 8.0 or newer, its driver, and a CUDA build of torch"


@cache
def lacking() -> str | None:
    """Which of it is not here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: nvidia-smi must list one"
    if (found := torch.cuda.get_device_capability()) < CAPABILITY:
        return f"{torch.cuda.get_device_name()} has {found[0]}.{found[1]}"
    return None


def pytest_report_header() -> str:
    """What the results are to be recorded with, or what they would need."""
    if reason := lacking():
        return f"{NEEDED}; {reason}"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"
    return f"{torch.cuda.get_device_name()}, {versions}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Show what drivers and kernels warn of, which nobody has seen yet; elsewhere a warning is an error."""
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: skip a test that needs a GPU where there is none; else give the shell's list of them back."""
    if item.get_closest_marker("cuda") is None:
        return
    if CARDS is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = CARDS
    if reason := lacking():
        pytest.skip(f"{NEEDED}; {reason}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Device:
    """The processor, or a GPU."""
    if request.param == "cpu":
        return Cpu(CpuConfig(), decide=Decisions())
    return Cuda(CudaConfig(deterministic=False), decide=Decisions())
