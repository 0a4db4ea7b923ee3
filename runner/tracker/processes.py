"""Finds and ends the processes below another one, those in sessions of their own included (Linux)."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, told apart from a later one with the same number by its start time (clock ticks since boot)."""

    pid: int
    started: int


def descendants(pid: int) -> list[Process]:
    """Every living process below `pid`, parents before children."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(fields[0], []).append(Process(int(entry.name), fields[1]))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += [process.pid for process in below]
    return found


def identify(pid: int) -> Process | None:
    """The process with this number, None if there is none or it has ended."""
    fields = _stat(pid)
    return Process(pid, fields[1]) if fields else None


def kill(processes: list[Process]) -> None:
    """SIGKILL each that is still the process it was; a stopped one dies too."""
    for process in processes:
        if identify(process.pid) == process:
            with suppress(ProcessLookupError):  # it ended by itself just now
                os.kill(process.pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process that has not ended; a zombie has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))
