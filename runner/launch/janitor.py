"""What is left to do where a launcher is killed: processes that it started are ended, folders in memory removed.

Janitor (launcher) ──pipe: {"watch": 71}, {"forget": 71}, {"folder": "/dev/shm/…"}──▶ this module as a program

The kernel ends each process that a launcher started, but not what that one started, and it removes no folder.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from runner.temporary import remove
from runner.tracker.processes import end_group

# The module by its path: whatever an environment has in store for Python's start is not for this process
PROGRAM = "import sys; sys.path += sys.argv[1:]; from runner.launch.janitor import main; main(sys.stdin.buffer)"
PATHS = [str(Path(__file__).resolve().parents[2]), str(Path(psutil.__file__).resolve().parents[1])]
SETTLE_S = 0.2  # for killed processes to be gone before the folders that they might write in


class Janitor:
    """The launcher's end: a process that lives a moment longer than this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, *PATHS],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the launcher's group is not for it
        )

    def remove(self, *folders: Path) -> None:
        """These folders, where they are there, go at the end, whatever this process ends of."""
        for folder in folders:
            self._tell({"folder": str(folder)})

    def watch(self, group: int) -> None:
        """This process group ends with the launcher."""
        self._tell({"watch": group})

    def forget(self, group: int) -> None:
        """It has ended; its number may be another one's soon."""
        self._tell({"forget": group})

    def close(self) -> None:
        """Have it done now; the processes that are watched have ended by themselves, or are killed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it: the next start removes what is stale
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def main(lines: Iterable[bytes]) -> None:
    """Listen until the launcher ends, then clean up after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the launcher does
    groups: set[int] = set()
    folders: list[str] = []
    for line in lines:
        told = json.loads(line)
        if "watch" in told:
            groups.add(told["watch"])
        elif "forget" in told:
            groups.discard(told["forget"])
        else:
            folders.append(told["folder"])
    for group in groups:
        end_group(group)
    if groups:
        time.sleep(SETTLE_S)
    for folder in folders:
        remove(Path(folder))
