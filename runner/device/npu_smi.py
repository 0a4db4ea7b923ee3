"""Parses the output of `npu-smi` by header, not by position, as columns move between releases.

    npu-smi info               ─▶ parse_info      a table of two-line records, then a table of processes
    npu-smi info -l            ─▶ parse_records   key : value
    npu-smi info -m            ─▶ parse_mapping   a table: card, chip, logical and physical number
    npu-smi info -t topo       ─▶ parse_topology  a matrix
    npu-smi info -t board -i N ─▶ parse_records

Nothing here imports torch or starts a process. A text that is none of these raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.device.device_stats import parse_number

FAILED = re.compile(r"dcmi .*failed.*ret is (-?\d+)", re.IGNORECASE)
_VERSION = re.compile(r"npu-smi\s+(\S+)\s+Version")
# A header's columns may stand one blank apart, so those of two words are named.
_COLUMN = re.compile(r"(?:NPU|Chip) (?:ID|Util\(%\))|Process \w+(?:\(MB\))?|\S+")
_USED_OF = re.compile(r"(\d+)\s*/\s*(\d+)")
_MATRIX_NAME = re.compile(r"(?:NPU|Phy-ID)\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuChip:
    """One chip of `npu-smi info`; None if the product prints no such column, or no number in it."""

    card: int
    chip: int
    name: str
    health: str
    physical: int | None = None
    bus: str | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    memory_used_mb: int | None = None  # of the chip's main memory: HBM, or DDR where there is none
    memory_total_mb: int | None = None


@dataclass(frozen=True, slots=True)
class NpuProcess:
    """A process that uses a chip."""

    card: int
    chip: int
    pid: int
    name: str
    memory_mb: int | None


@dataclass(frozen=True, slots=True)
class NpuInfo:
    """The whole of `npu-smi info`."""

    version: str
    chips: tuple[NpuChip, ...]
    processes: tuple[NpuProcess, ...]


def parse_info(text: str) -> NpuInfo:
    """`npu-smi info`. Raises ValueError if it reports a failure or has no table."""
    if failed := FAILED.search(text):
        raise ValueError(failed.group().strip())
    version = _VERSION.search(text)
    top: list[list[str]] = []  # the two lines of the header, a list of columns per cell
    below: list[list[str]] = []
    pending: list[str] = []
    chips: list[NpuChip] = []
    processes: list[NpuProcess] = []
    in_processes: list[list[str]] | None = None
    for cells in _rows(text):
        if any("Process id" in cell for cell in cells):
            in_processes = [_COLUMN.findall(cell) for cell in cells]
        elif in_processes is not None:
            processes += _process(in_processes, cells)
        elif "Health" in cells:
            top, pending = [_COLUMN.findall(cell) for cell in cells], []
        elif any("Bus-Id" in cell for cell in cells):
            below = [_COLUMN.findall(cell) for cell in cells]
        elif top and not pending:
            pending = cells
        elif top:
            chips.append(_chip(_values(top, pending) | _values(below, cells)))
            pending = []
    if not chips:
        raise ValueError("no table of NPUs with a column Health in what npu-smi info printed")
    return NpuInfo(version[1] if version else "unknown", tuple(chips), tuple(processes))


def parse_records(text: str) -> list[dict[str, str]]:
    """`key : value` lines, keys in lower case; a repeated `NPU ID` begins a new record."""
    records: list[dict[str, str]] = [{}]
    for key, value in _pairs(text):
        if key == "npu id" and key in records[-1]:
            records.append({})
        records[-1][key] = value
    return [record for record in records if record]


@dataclass(frozen=True, slots=True)
class ChipLocation:
    """A chip: card and chip as npu-smi counts, the number programs use, and that of /dev/davinciN."""

    card: int
    chip: int
    logical: int
    physical: int
    name: str


def parse_mapping(text: str) -> list[ChipLocation]:
    """`npu-smi info -m` without the management units. Raises ValueError if there is no such table."""
    lines = [re.split(r"\t+|\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    header = next((index for index, row in enumerate(lines) if "Chip Logic ID" in row), None)
    if header is None:
        raise ValueError("no table with a column Chip Logic ID in what npu-smi info -m printed")
    rows = [dict(zip(lines[header], row, strict=False)) for row in lines[header + 1 :]]
    places = []
    for row in rows:
        if row.get("Chip Logic ID", "-").isdecimal():  # an Mcu has "-"
            logical = int(row["Chip Logic ID"])
            physical = int(row.get("Chip Phy-ID", logical))
            card, chip = int(row["NPU ID"]), int(row["Chip ID"])
            places.append(ChipLocation(card, chip, logical, physical, row.get("Chip Name", "")))
    return places


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """`npu-smi info -t topo`: (from, to) → kind of link, without the diagonal. Raises ValueError."""
    names: Sequence[str] = ()
    links: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        words = line.split()
        if not names and _MATRIX_NAME.fullmatch(words[0] if words else ""):
            names = [word for word in words if _MATRIX_NAME.fullmatch(word)]
        elif names and words and _MATRIX_NAME.fullmatch(words[0]):
            links |= {(words[0], name): kind for name, kind in zip(names, words[1:], strict=False) if name != words[0]}
    if not names:
        raise ValueError("no matrix of NPUs in what npu-smi info -t topo printed")
    return links


def _rows(text: str) -> Iterator[list[str]]:
    """The cells of every line of a drawn table."""
    for line in text.splitlines():
        if line.strip().startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip():
            yield " ".join(key.split()).lower(), value.strip()


def _values(header: Sequence[Sequence[str]], cells: Sequence[str]) -> dict[str, str]:
    """Column → text. A cell has as many values as its header has columns; `used / total` is one value."""
    values: dict[str, str] = {}
    for columns, cell in zip(header, cells, strict=False):
        words = _USED_OF.sub(r"\1/\2", cell).split()
        values |= dict(zip(columns, words, strict=False))
    return values


def _chip(values: Mapping[str, str]) -> NpuChip:
    hbm, ddr = _used_of(values.get("HBM-Usage(MB)")), _used_of(values.get("Memory-Usage(MB)"))
    used, total = hbm if hbm[1] else ddr
    physical = parse_number(values.get("Phy-ID", values.get("Device")))
    return NpuChip(
        card=int(values.get("NPU", values.get("NPU ID", "0"))),
        chip=int(values.get("Chip") or values.get("Chip ID") or 0),
        name=values.get("Name", ""),
        health=values.get("Health", ""),
        physical=None if physical is None else int(physical),
        bus=values.get("Bus-Id"),
        power_w=parse_number(values.get("Power(W)")),
        temperature_c=parse_number(values.get("Temp(C)")),
        utilization_percent=parse_number(values.get("AICore(%)", values.get("NPU Util(%)"))),
        memory_used_mb=used,
        memory_total_mb=total,
    )


def _process(header: Sequence[Sequence[str]], cells: Sequence[str]) -> list[NpuProcess]:
    values = _values(header, cells)
    pid = values.get("Process id", "")
    if not pid.isdecimal():  # "No running processes found in NPU 0"
        return []
    card, memory = values.get("NPU", values.get("NPU ID", "0")), values.get("Process memory(MB)", "")
    name = next((cell for columns, cell in zip(header, cells, strict=False) if "Process name" in columns), "")
    memory_mb = int(memory) if memory.isdecimal() else None
    return [NpuProcess(int(card), int(values.get("Chip", "0")), int(pid), name, memory_mb)]


def _used_of(text: str | None) -> tuple[int | None, int | None]:
    found = _USED_OF.fullmatch(text or "")
    return (int(found[1]), int(found[2])) if found else (None, None)
