"""What accelerators have in common, through `torch.accelerator`, and torch's own module of each for its memory.

torch.accelerator counts the memory of those devices only whose allocator is a `c10::DeviceAllocator`. That of torch_npu
2.13 is one, that of 2.10, which CANN 9.0 and 9.1 go with, is not; torch.npu counts with both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

from runner.core.device_kinds import Kind
from runner.core.errors import EnvironmentProblem
from runner.core.rank_info import Place
from runner.device.visible import listed


def allocator(device: torch.device) -> dict[str, float]:
    """Bytes that tensors hold, and that the allocator has of the device."""
    own = torch.get_device_module(device)
    return {
        "allocated_bytes": float(own.memory_allocated(device)),
        "reserved_bytes": float(own.memory_reserved(device)),
    }


def refuse_hidden(kind: Kind, count: int) -> None:
    """Raise EnvironmentProblem if the driver shows another number of cards than the list of visible ones names: it
    drops a wrong number without a word, and the job would run on other cards than was meant."""
    asked = listed(kind)
    if asked is not None and len(asked) != count:
        named = "1 device" if len(asked) == 1 else f"{len(asked)} devices"
        raise EnvironmentProblem(
            f"device={kind.name}: {kind.visible}={os.environ[str(kind.visible)]} names {named}, "
            f"and the driver shows {count}\n  correct the list, or: unset {kind.visible}"
        )


@contextmanager
def starting(device: str) -> Iterator[None]:
    """Around the first use of a card: what torch then refuses, of this shell's variables mostly, is raised as
    EnvironmentProblem; memory that is out stays what it is."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise EnvironmentProblem(f"device={device}: {said}\n  what is wrong: run doctor device={device}") from error


def own_card(kind: Kind, count: int) -> torch.device:
    """Take this process's card: the one with its number among the processes of this machine.

    Raises EnvironmentProblem like `refuse_hidden`, or if there are too few.
    """
    refuse_hidden(kind, count)
    place = Place.of(os.environ)
    if place.local_size > count:
        many = f"{place.local_size} processes on this machine want a card each"
        fewer = "launch.devices=1 parallelism=single" if count == 1 else f"launch.devices={count}"
        advice = f"type {fewer}, or let {kind.visible} list more"
        raise EnvironmentProblem(f"device={kind.name}: {many}, and the driver shows {count}\n  {advice}")
    with starting(kind.name):
        torch.accelerator.set_device_index(place.local_rank)
    return torch.device(kind.name, place.local_rank)


def use_deterministic(wanted: bool) -> None:
    """Let torch use deterministic kernels only, or fail; without `wanted`, any. Memory that `torch.empty` gives is not
    filled: nothing here reads what nobody wrote, and every gather would pay for it."""
    # the same switch as use_deterministic_algorithms, which would import the whole of torch's compiler for it
    torch.set_deterministic_debug_mode("error" if wanted else "default")
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module in disguise
