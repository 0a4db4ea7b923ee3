"""Finds and ends the processes below another one, those in sessions of their own included (Linux)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Programs that clear away what other processes leave, as soon as these are dead; then they end by themselves
CLEANERS = (b"multiprocessing.resource_tracker", b"runner.launch.janitor")
SETTLE_S = 2.0  # for them to do so
TICK_S = 0.01


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


def end_group(group: int) -> None:
    """SIGKILL to all processes of a group; to those that clear away what the others leave last, if they have not ended
    by then."""
    members = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    mine = [one for pid in members if _group(pid) == group and (one := identify(pid)) is not None]
    cleaners = [one for one in mine if cleans(one)]
    with suppress(PermissionError):
        kill([one for one in mine if one not in cleaners])
    end = time.monotonic() + SETTLE_S
    while any(identify(one.pid) == one for one in cleaners) and time.monotonic() < end:
        time.sleep(TICK_S)
    with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
        os.killpg(group, signal.SIGKILL)


def cleans(process: Process) -> bool:
    """Whether it only clears away what others leave."""
    words = _words(process.pid)
    return any(program in words for program in CLEANERS)


def _group(pid: int) -> int | None:
    """The number of a process's group; None where it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _words(pid: int) -> bytes:
    """What a process was started with; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process that has not ended; a zombie has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))
