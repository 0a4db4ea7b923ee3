"""Finds and ends the processes below another one, those in sessions of their own included."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

# Programs that clear away what other processes leave, as soon as these are dead; then they end by themselves
CLEANERS = ("multiprocessing.resource_tracker", "runner.launch.janitor")
SETTLE_S = 2.0  # for them to do so


Identity = tuple[int, int]  # number and start time, in clock ticks since boot: no later process has both


def identify(pid: int) -> Identity | None:
    """What tells a living process from a later one with its number, also for another process to read; None of one that
    has ended. Not psutil's create_time, which moves when the clock is set."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else (pid, int(fields[19]))


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; a zombie has, and a later process with the same number is another one."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """Every living process below `pid`, parents before children."""
    try:
        return [process for process in psutil.Process(pid).children(recursive=True) if is_alive(process)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL each that is still the process it was; a stopped one dies too."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended by itself
            process.kill()


def end_group(group: int) -> None:
    """SIGKILL to all processes of a group; to those that clear away what the others leave last, if they have not ended
    by then."""
    mine = [process for process in psutil.process_iter() if _group(process.pid) == group and is_alive(process)]
    cleaners = [process for process in mine if cleans(process)]
    with suppress(psutil.AccessDenied):
        kill([process for process in mine if process not in cleaners])
    psutil.wait_procs(cleaners, timeout=SETTLE_S)
    with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
        os.killpg(group, signal.SIGKILL)


def cleans(process: psutil.Process) -> bool:
    """Whether it only clears away what others leave."""
    try:
        words = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return any(program in words for program in CLEANERS)


def _group(pid: int) -> int | None:
    """The number of a process's group; None where it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
