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
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from runner.core.fsync_io import remove_temporary_folder, temporary_folder
from runner.core.subprocess import ChildProcess, JsonLines, kill_session
from runner.weight_sync.store_dir import store_dirs

if TYPE_CHECKING:  # the cleanup process has no site-packages
    from runner.core.rank_info import RankInfo
    from runner.run_dir.folder import RunFolder
    from runner.spec.job import JobSpec

# Isolated: no site-packages, no PYTHON* variables; the module is found by its path
PROGRAM = "import sys; sys.path += sys.argv[1:]; from runner.launch.cleanup_process import main; main(sys.stdin.buffer)"
PATHS = [str(Path(__file__).resolve().parents[2]), str(Path(psutil.__file__).resolve().parents[1])]
SETTLE_S = 0.2  # until killed processes have ended and no longer write to the folders


class CleanupProcess:
    """Starts the cleanup process, which outlives the launcher."""

    def __init__(self) -> None:
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, *PATHS]
        self._process = ChildProcess(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        # if a user kills this process, the next start removes what is left
        self._lines = JsonLines(writing=self._stdin.fileno())

    def remove(self, *folders: Path) -> None:
        """Remove these folders, if they exist, when the launcher ends for any reason."""
        for folder in folders:
            self._lines.send({"folder": str(folder)})

    def watch(self, group: int) -> None:
        """Kill this session (the process id of its leader) when the launcher ends."""
        self._lines.send({"watch": group})

    def forget(self, group: int) -> None:
        """Stop watching an ended session, whose id may be used again."""
        self._lines.send({"forget": group})

    def close(self) -> None:
        """Clean up now: kill the watched sessions and remove the folders."""
        self._stdin.close()
        self._process.wait()


def scratch_folders(folder: RunFolder, place: RankInfo | None) -> tuple[Path, ...]:
    """Folders that remain if a process of the job is killed. place: of a rank, None of a sampler."""
    # the first rank of a machine stores the weights for samplers
    weights = store_dirs(folder.root) if place is not None and place.local_rank == 0 else ()
    return (folder.engine, temporary_folder(folder.engine), *weights)


@contextmanager
def remove_scratch_at_end(spec: JobSpec, folder: RunFolder, place: RankInfo) -> Iterator[None]:
    """Remove the engine's files of a rank without a launcher at the end, also if it is killed."""
    if not spec.sampler.engine:
        yield
        return
    with closing(CleanupProcess()) as cleanup:
        cleanup.remove(*scratch_folders(folder, place))
        yield


def main(lines: Iterable[bytes]) -> None:
    """Read messages until the launcher ends, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the launcher
    groups: set[int] = set()
    folders: list[str] = []
    for line in lines:
        message = json.loads(line)
        if "watch" in message:
            groups.add(message["watch"])
        elif "forget" in message:
            groups.discard(message["forget"])
        else:
            folders.append(message["folder"])
    for group in groups:
        kill_session(group)
    if groups:
        time.sleep(SETTLE_S)
    for folder in folders:
        remove_temporary_folder(Path(folder))
