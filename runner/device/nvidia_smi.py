"""Reads what `nvidia-smi` prints. Nothing here imports torch or starts a process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

FIELDS = "index,name,uuid,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw"
QUERY = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of the query; None where the GPU does not say."""

    index: int
    name: str
    uuid: str
    memory_used_mb: int
    memory_total_mb: int
    utilization_percent: float | None
    temperature_c: float | None
    power_w: float | None


def parse_query(text: str) -> list[Gpu]:
    """What QUERY prints; lines of another shape (messages of a driver) are no GPUs."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [_gpu(row) for row in rows if len(row) == len(FIELDS.split(",")) and row[0].isdecimal()]


def links(text: str) -> dict[str, int]:
    """`nvidia-smi topo -m`: kind of link (NV18, PIX, SYS, …) → number of GPU pairs; may be empty."""
    rows = [line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in text.splitlines()]
    gpus = [row for row in rows if row and row[0].startswith("GPU") and row[0][3:].isdecimal() and "X" in row]
    kinds = Counter(row[1 + column] for index, row in enumerate(gpus) for column in range(len(gpus)) if column > index)
    return dict(kinds)


def _gpu(row: list[str]) -> Gpu:
    index, name, uuid, used, total, *readings = row
    return Gpu(int(index), name, uuid, int(_number(used) or 0), int(_number(total) or 0), *map(_number, readings))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
