"""Cleans up after a killed supervisor: ends processes that it started, removes folders in memory.

CleanupProcess (supervisor) ──pipe: {"watch": 71}, {"forget": 71}, {"folder": "/dev/shm/…"}──▶ this module as a program

The kernel ends the processes that a supervisor started, but not their children, and it removes no folder.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from runner.core.fsync_io import remove_temporary_folder
from runner.core.subprocess import ChildProcess, JsonLines, kill_session

# The module by its path: whatever an environment has in store for Python's start is not for this process
PROGRAM = "import sys; sys.path += sys.argv[1:]; from runner.launch.cleanup_process import main; main(sys.stdin.buffer)"
PATHS = [str(Path(__file__).resolve().parents[2]), str(Path(psutil.__file__).resolve().parents[1])]
SETTLE_S = 0.2  # for killed processes to be gone before the folders that they might write in


class CleanupProcess:
    """The launcher's end: a process that lives a moment longer than this one."""

    def __init__(self) -> None:
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, *PATHS]
        self._process = ChildProcess(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        self._lines = JsonLines(
            writing=self._stdin.fileno()
        )  # one that somebody has killed leaves the next start to remove what is stale

    def remove(self, *folders: Path) -> None:
        """These folders, where they are there, go at the end, whatever this process ends of."""
        for folder in folders:
            self._lines.send({"folder": str(folder)})

    def watch(self, group: int) -> None:
        """This session, by its leader's number, ends with the launcher."""
        self._lines.send({"watch": group})

    def forget(self, group: int) -> None:
        """It has ended; its number may be another one's soon."""
        self._lines.send({"forget": group})

    def close(self) -> None:
        """Have it done now; the processes that are watched have ended by themselves, or are killed."""
        self._stdin.close()
        self._process.wait()


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
        kill_session(group)
    if groups:
        time.sleep(SETTLE_S)
    for folder in folders:
        remove_temporary_folder(Path(folder))
