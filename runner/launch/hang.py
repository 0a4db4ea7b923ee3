"""A rank that the others wait for: every rank's stacks, and where the one is that does not answer."""

from __future__ import annotations

import faulthandler
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from runner.launch.member import Member

DUMP_S = 1.0  # for ranks to write their stacks
HEAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*most recent call first.*:$", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"<frozen"})
STOPPED = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "in the kernel, waiting for a disk or a device"}


def watch_stacks(handle: int) -> None:
    """Write every thread's stack to this descriptor where a library crashes, and when the launcher asks for it."""
    faulthandler.enable(handle)
    faulthandler.register(signal.SIGUSR1, handle, all_threads=True)


def dump(ranks: Sequence[Member], lagging: Sequence[Member]) -> list[str]:
    """Have each rank write its stacks to its log; returns a line for each of the lagging ones."""
    before = {member.name: size(member.folder.log) for member in ranks}
    for member in ranks:
        member.signal(signal.SIGUSR1)
    time.sleep(DUMP_S)
    return [f"{member.name} {_where(member, before[member.name])}" for member in lagging]


def size(log: Path) -> int:
    """Bytes that a log has; 0 if it is not there."""
    return log.stat().st_size if log.exists() else 0


def _where(member: Member, before: int) -> str:
    """What a rank does, as the kernel and its main thread's stack tell."""
    step = f"is in step {member.ear.step + 1}"
    if stopped := STOPPED.get(_state(member.process.pid)):
        return f"{step}, and is {stopped}"
    with member.folder.log.open("rb") as log:
        log.seek(before)
        found = place_of(log.read().decode(errors="replace"))
    return f"{step}, {found}" if found else f"{step}, and does not say where: a library holds its threads"


def place_of(stacks: str) -> str:
    """Where the main thread, which faulthandler writes last, is in code that is no library's; empty if nowhere."""
    last = HEAD.split(stacks)[-1] if HEAD.search(stacks) else ""
    frames = list(FRAME.finditer(last))
    own = next((frame for frame in frames if not frame["file"].startswith(LIBRARIES)), next(iter(frames), None))
    return f"at {own['file']}:{own['line']}, in {own['function']}" if own else ""


def _state(pid: int) -> str:
    """The kernel's letter for what a process does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
