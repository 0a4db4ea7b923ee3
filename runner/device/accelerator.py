"""What accelerators have in common, through `torch.accelerator`."""

from __future__ import annotations

import os

import torch

from runner.device.visible import VARIABLES, parse
from runner.errors import EnvironmentProblem

NAMED = {"cuda": ("GPU-", "MIG-"), "npu": ()}  # how devices may be called in a list, beside their numbers


def allocator(device: torch.device) -> dict[str, float]:
    """Bytes that tensors hold, and that the allocator has of the device."""
    return {
        "allocated_bytes": float(torch.accelerator.memory_allocated(device)),
        "reserved_bytes": float(torch.accelerator.memory_reserved(device)),
    }


def refuse_hidden(kind: str, count: int) -> None:
    """Raise EnvironmentProblem if fewer devices are there than the list of visible ones names: drivers drop a wrong
    number without a word, and the job would run on other cards than was meant."""
    variable = VARIABLES[kind]
    text = os.environ.get(variable)
    if text is None:
        return
    asked = parse(text, NAMED[kind])
    if asked.faults or len(asked.ids) != count:
        faults = "".join(f"; {fault}" for fault in asked.faults)
        raise EnvironmentProblem(
            f"device={kind}: {variable}={text} names {len(asked.ids)} devices, and the driver shows {count}{faults}\n"
            f"  correct the list, or: unset {variable}"
        )
