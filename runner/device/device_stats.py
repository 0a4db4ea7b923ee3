"""What a device is doing now: how busy, warm and full it is, by name. Nothing here imports torch.

    this process   psutil
    a GPU          nvidia-smi --query-gpu …, the line with its uuid
    an NPU         npu-smi info, the chip that npu-smi info -m gives for the number that programs use

A name ends in its unit: `_percent`, `_c`, `_w`, `_bytes`. What a product does not print is left out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import psutil

from runner.core.errors import EnvironmentProblem
from runner.device.device_kinds import parse_visible

if TYPE_CHECKING:
    from runner.device import npu_smi, nvidia_smi

DEADLINE_S = 20.0
StatsReader = Callable[[], Mapping[str, float]]


def process_stats_reader() -> StatsReader:
    """Of this process: percent of one core since the last reading, and the memory that it occupies."""
    process = psutil.Process()
    process.cpu_percent()  # the first call begins the first interval

    def read() -> Mapping[str, float]:
        return {"utilization_percent": process.cpu_percent(), "resident_bytes": float(process.memory_info().rss)}

    return read


def gpu_stats_reader(uuid: str) -> StatsReader:
    """Of the GPU with this uuid, with or without its GPU-."""

    from runner.device import nvidia_smi

    def read() -> Mapping[str, float]:
        for found in nvidia_smi.parse_query(command_output(*nvidia_smi.QUERY)):
            if found.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
                return _stats(found)
        raise EnvironmentProblem(f"nvidia-smi lists no GPU {uuid}")

    return read


def npu_stats_reader(index: int, visible: str | None) -> StatsReader:
    """Reads the NPU that this process calls `index`; `visible`: the list of visible devices, if any."""
    from runner.device import npu_smi

    logical = index if visible is None else parse_visible(visible).ids[index]
    places: list[npu_smi.ChipLocation] = []

    def read() -> Mapping[str, float]:
        if not places:
            places.extend(npu_smi.parse_mapping(command_output("npu-smi", "info", "-m")))
        here = [place for place in places if place.logical == logical]
        for found in npu_smi.parse_info(command_output("npu-smi", "info")).chips:
            if here and (found.card, found.chip) == (here[0].card, here[0].chip):
                return _stats(found)
        raise EnvironmentProblem(f"npu-smi lists no chip with the logical number {logical}")

    return read


def _stats(of: nvidia_smi.Gpu | npu_smi.NpuChip) -> dict[str, float]:
    found = {name: getattr(of, name) for name in ("utilization_percent", "temperature_c", "power_w")}
    found["memory_used_bytes"] = None if of.memory_used_mb is None else of.memory_used_mb * 2.0**20
    return {name: value for name, value in found.items() if value is not None}


def command_output(*command: str) -> str:
    """Output of a program in the C locale. Raises EnvironmentProblem if it cannot be run, or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentProblem(f"{' '.join(command[:2])}: {error}") from error
    return done.stdout
