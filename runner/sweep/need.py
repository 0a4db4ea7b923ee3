"""What a job occupies while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.device.visible import VARIABLES
from runner.errors import Problem, SpecError
from runner.launch.base import StartedConfig
from runner.launch.ray.config import RayConfig

ORDER = ("npu", "cuda")  # which kind device=auto takes where there are several, like the device itself
Cards = Sequence[str] | None  # the kinds of card where jobs run; None: not known
WORDS = {"core": "core", "cuda": "GPU", "npu": "NPU"}
LOWER_CARDS = "lower launch.devices or launch.samplers"
LOWER_CORES = "lower device.threads, launch.devices or launch.samplers"


@dataclass(frozen=True, slots=True)
class Need:
    """Cores of a machine, GPUs or NPUs, and how many of them."""

    kind: Literal["core", "cuda", "npu"] = "core"
    count: int = 1

    def __str__(self) -> str:
        return counted(self.count, self.kind)


def counted(count: int, kind: str) -> str:
    """`1 GPU`, `2 cores`"""
    return f"{count} {WORDS[kind]}{'s' if count > 1 else ''}"


def placed(need: Need, devices: Sequence[str]) -> str:
    """On what a job runs: `core 0,1`, `npu 3`; `node7`, where only its machine is known and it wants no card."""
    names = ",".join(devices)
    return names if need.kind == "core" and not all(map(str.isdigit, devices)) else f"{need.kind} {names}".rstrip()


def need_of(spec: Any, cards: Cards) -> Need:
    """What a job occupies where there are these kinds of card.

    Raises SpecError for device=auto if none is known, and for a job on several machines, or that something else starts.
    """
    if isinstance(spec.launch, StartedConfig):
        text = f"{spec.launch.name}: the sweep starts its jobs; on Slurm with sweep.on=slurm and launch=local"
        raise SpecError([Problem("launch", text)])
    if isinstance(spec.launch, RayConfig) and spec.launch.address is not None:
        typed = f"launch=local sweep.on=ray sweep.address={spec.launch.address}"
        text = f"the sweep itself gives its jobs their devices; type {typed}"
        raise SpecError([Problem("launch.address", text)])
    if (nodes := spec.launch.machines) > 1:
        text = f"is {nodes}, and a job of a sweep has one machine; leave it out"
        raise SpecError([Problem("launch.nodes", text)])
    kind = spec.device.name
    if kind == "auto":
        if cards is None:
            text = "auto is not known before a job runs there; name the device: cpu, cuda or npu"
            raise SpecError([Problem("device", text)])
        kind = next((k for k in ORDER if k in cards), "cpu")
    processes = spec.launch.devices + spec.launch.samplers
    if kind in VARIABLES:
        return Need(kind, processes)
    return Need("core", getattr(spec.device, "threads", 1) * processes)
