"""Hides torch_npu from processes that do not use it: without CANN it breaks `import torch`.

torch loads torch_npu by itself wherever it is installed, and transformers imports it wherever it finds it. Nothing here
imports either.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys

from runner.core.device_kinds import Kind
from runner.device.device_kinds import NPU

MODULE = "torch_npu"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
LIBRARY = "libhccl.so"  # CANN's library for sums over cards, the first that torch_npu needs


def hide_torch_npu(device: str, kind: Kind) -> str | None:
    """Hide torch_npu from this process, before torch is imported, if `device` does not use it.

    `auto` has, unless torch_npu cannot be loaded. Returns the reason, None where there is nothing to hide. Processes
    started from here inherit that torch does not load it by itself.
    """
    uses = kind is NPU and device != "auto"
    if uses or MODULE in sys.modules or importlib.util.find_spec(MODULE) is None:
        return None
    fault = torch_npu_problem()
    if device == "auto" and fault is None:
        return None
    os.environ[AUTOLOAD] = "0"
    sys.modules[MODULE] = None  # type: ignore[assignment]  # what makes Python say that there is no such module
    reason = f"device={device} has no use for it" if device != "auto" else "it cannot be loaded"
    return reason if fault is None else f"{reason}; {fault}: run doctor device=npu says what to do"


def torch_npu_problem() -> str | None:
    """What will make `import torch_npu` fail, as far as that can be told without trying it."""
    torch, npu = _version("torch"), _version(MODULE)
    if torch and npu and torch.split(".")[:3] != npu.split(".")[:3]:
        return f"torch_npu {npu} is not for torch {torch}"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return f"CANN is not installed or not loaded ({LIBRARY} is not found)"
    return None


def _version(name: str) -> str | None:
    """The version of an installed distribution, without a local part (+cpu)."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
