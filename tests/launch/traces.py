"""What a command and all that it starts leave behind: its processes are told by a mark that each of them inherits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from runner.core.subprocess import descendants, is_alive

MARK = "TEST_TRACES"
FILES = re.compile(r"/tmp/run-ray-\w+|/dev/shm/[^ \0\n]+")
LISTENS = "0A"  # the kernel's word for a listening socket, in /proc/net/tcp


class Traces:
    """Processes with a mark; the sockets they listened at, their files in memory, and a folder for temporary files.

    environment: for the command; temporary: what it takes for /tmp
    """

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self.cache = temporary.with_suffix(".cache")  # torch's own, which is kept from one job to the next
        self.environment = {
            MARK: uuid.uuid4().hex,
            "TMPDIR": str(temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
        }
        self.files, self.sockets, self.known = set[Path](), set[str](), set[psutil.Process]()

    def processes(self, name: str = "") -> list[int]:
        """Those that run now; those that have `name` among their words."""
        self._find()
        alive = [one.pid for one in self.known if is_alive(one)]
        return sorted(pid for pid in alive if name in _words(pid))

    def _find(self) -> None:
        """Take in those that have the mark, and all below them: Ray's workers write their names over it."""
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        for pid in [pid for pid in numbers if f"{MARK}={self.environment[MARK]}" in _read(pid, "environ").split("\0")]:
            with suppress(psutil.NoSuchProcess):
                self.known |= {psutil.Process(pid), *descendants(pid)}

    def look(self) -> None:
        """Remember what the processes have now."""
        for pid in self.processes():
            words = _words(pid) + "\0" + _read(pid, "maps")
            self.files |= {Path(name) for name in FILES.findall(words)}
            self.sockets |= _sockets(pid) & _listening()

    def left(self, within_s: float = 30.0) -> dict[str, object]:
        """What is still there after so many seconds; empty where nothing is."""
        end = time.monotonic() + within_s
        while (found := self._left()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def _left(self) -> dict[str, object]:
        found = {
            "processes": [(pid, _words(pid)) for pid in self.processes()],
            "ports": sorted(self.sockets & _listening()),
            "files": sorted(str(path) for path in self.files if path.exists()),
            "temporary": sorted(str(path) for path in self.temporary.rglob("*")),
        }
        return {name: what for name, what in found.items() if what}


@contextmanager
def traces() -> Iterator[Traces]:
    """What is left at the end is removed; that there is something is for the test to find."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: names of sockets have 107 bytes
    one = Traces(folder)
    try:
        yield one
    finally:
        for pid in one.processes():
            os.kill(pid, signal.SIGKILL)
        for left in (folder, one.cache):
            shutil.rmtree(left, ignore_errors=True)


def _words(pid: int) -> str:
    """What a process was started with."""
    return _read(pid, "cmdline").replace("\0", " ")


def _read(pid: int, name: str) -> str:
    """A file of a process; empty where it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _sockets(pid: int) -> set[str]:
    """The numbers of the sockets that a process has open."""
    found = set()
    try:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            found.add(os.readlink(handle))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return {name.removeprefix("socket:[").rstrip("]") for name in found if name.startswith("socket:[")}


def _listening() -> set[str]:
    """The numbers of this machine's sockets that listen at a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == LISTENS}
