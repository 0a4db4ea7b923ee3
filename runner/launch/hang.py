"""A process that others wait for: the stacks of all, and where the one is that does not answer."""

from __future__ import annotations

import faulthandler
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from runner.launch.member import Process

DUMP_S = 1.0  # for processes to write their stacks
HEAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*most recent call first.*:$", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"<frozen"})
STOPPED = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "in the kernel, waiting for a disk or a device",
}


def watch_stacks(handle: int) -> None:
    """Write every thread's stack to this descriptor where a library crashes, and when the launcher asks for it."""
    faulthandler.enable(handle)
    faulthandler.register(signal.SIGUSR1, handle, all_threads=True)


def dump(members: Sequence[Process], lagging: Sequence[Process]) -> list[str]:
    """Have each process write its stacks to its log; returns a line for each of the lagging ones."""
    before = {member.order.name: size(member.order.folder.log) for member in members}
    for member in members:
        member.signal(signal.SIGUSR1)
    time.sleep(DUMP_S)
    return [f"{member.order.name} {_where(member, before[member.order.name])}" for member in lagging]


def size(log: Path) -> int:
    """Bytes that a log has; 0 if it is not there."""
    return log.stat().st_size if log.exists() else 0


def _where(member: Process, before: int) -> str:
    """What a process does, as the kernel and its main thread's stack tell; of a rank, in which step."""
    step = [f"in step {member.ear.step + 1}"] if member.order.role == "rank" else []
    if stopped := STOPPED.get(member.status()):
        return " and ".join(f"is {words}" for words in (*step, stopped))
    log = member.order.folder.log
    found = place_of(log.read_bytes()[before:].decode(errors="replace")) if log.exists() else ""
    return f"is {', '.join((*step, found or 'where it does not say: a library holds its threads'))}"


def place_of(stacks: str) -> str:
    """Where the main thread, which faulthandler writes last, is in code that is no library's; empty if nowhere."""
    last = HEAD.split(stacks)[-1] if HEAD.search(stacks) else ""
    frames = list(FRAME.finditer(last))
    own = next((frame for frame in frames if not frame["file"].startswith(LIBRARIES)), next(iter(frames), None))
    return f"at {own['file']}:{own['line']}, in {own['function']}" if own else ""
