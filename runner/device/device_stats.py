"""Current utilization, temperature, power and memory of a device. Nothing here imports torch.

    a GPU    nvidia-smi --query-gpu …, the line with its uuid
    an NPU   npu-smi info, the chip that npu-smi info -m gives for the number that programs use

A name ends in its unit: `_percent`, `_c`, `_w`, `_bytes`. Values that a product does not print are omitted.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.core.device_kinds import parse_visible
from runner.core.errors import EnvironmentProblem

if TYPE_CHECKING:
    from runner.device import npu_smi


DEADLINE_S = 20.0
StatsReader = Callable[[], Mapping[str, float]]


def gpu_stats_reader(uuid: str) -> StatsReader:
    """Reads the GPU with this uuid, with or without the prefix GPU-."""

    def read() -> Mapping[str, float]:
        for found in parse_query(command_output(*QUERY)):
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


def _stats(of: Gpu | npu_smi.NpuChip) -> dict[str, float]:
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


FIELDS = "index,name,uuid,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw"
QUERY = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of the query; None for a value that the GPU does not report."""

    index: int
    name: str
    uuid: str
    memory_used_mb: int
    memory_total_mb: int
    utilization_percent: float | None
    temperature_c: float | None
    power_w: float | None


def parse_query(text: str) -> list[Gpu]:
    """The output of QUERY; other lines (messages of a driver) are skipped."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [_gpu(row) for row in rows if len(row) == len(FIELDS.split(",")) and row[0].isdecimal()]


def links(text: str) -> dict[str, int]:
    """`nvidia-smi topo -m`: kind of link (NV18, PIX, SYS, …) → number of GPU pairs; may be empty."""
    rows = [line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in text.splitlines()]
    gpus = [row for row in rows if row and row[0].startswith("GPU") and row[0][3:].isdecimal() and "X" in row]
    return Counter(row[1 + column] for index, row in enumerate(gpus) for column in range(index + 1, len(gpus)))


def _gpu(row: list[str]) -> Gpu:
    index, name, uuid, *columns = row
    used, total, *readings = map(parse_number, columns)
    return Gpu(int(index), name, uuid, int(used or 0), int(total or 0), *readings)


def parse_number(text: str | None) -> float | None:
    """The number in a column of a tool's output; None if there is none."""
    try:
        return float(text or "")
    except ValueError:
        return None
