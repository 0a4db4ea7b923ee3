"""A process of a job on this machine: whoever signals it, its end is taken in once, with all that belongs to it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from runner.launch import worker_process as module
from runner.launch.cleanup_process import CleanupProcess
from runner.launch.worker_process import LocalWorker, WorkerSpec
from runner.run_dir.folder import RunFolder
from tests.launch.several import ROOT, alive, gone

# Starts something that would live on, says why it ends, and ends
PROGRAM = """
import subprocess, sys
from runner.core.errors import DataError
from runner.launch.heartbeat import ExitReport, HeartbeatWriter
sleeping = subprocess.Popen(["sleep", "1000"])
print(sleeping.pid, flush=True)
HeartbeatWriter(int(sys.argv[3])).report(ExitReport.from_error(DataError("line 7 is no JSON")))
"""


class Watched:
    """Stands for a cleanup: the groups that it is to end."""

    def __init__(self) -> None:
        self.groups: set[int] = set()

    def watch(self, group: int) -> None:
        self.groups.add(group)

    def forget(self, group: int) -> None:
        self.groups.remove(group)


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalWorker]:
    """A process that has ended, of which nobody has taken note yet."""
    monkeypatch.setitem(module.PROGRAMS, "rank", ("-c", PROGRAM))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    order = WorkerSpec(role="rank", index=0, folder=RunFolder(tmp_path), attempt=1, cards=(0,), environment={})
    one = LocalWorker.start(order, environment, cleanup=cast(CleanupProcess, Watched()))
    os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
    yield one
    one.kill()


def test_a_signal_to_one_that_has_just_ended_takes_nothing_from_its_end(dead: LocalWorker) -> None:
    started = int(dead.spec.folder.log.read_text())
    assert alive([started])
    dead.signal(signal.SIGUSR1)
    assert not dead.is_running()
    assert dead.heartbeat.report is not None and dead.heartbeat.report.message == "line 7 is no JSON"
    assert gone([started]) and cast(Watched, dead.cleanup).groups == set()


def test_no_signal_reaches_a_number_that_is_another_ones_by_now(
    dead: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    wait, other = subprocess.Popen.wait, threading.Thread(target=lambda: dead.signal(signal.SIGUSR1))

    def reap(process: subprocess.Popen[bytes]) -> int:
        """Between the end of the process and the note of it, another thread signals."""
        os.waitid(os.P_PID, process.pid, os.WEXITED)
        other.start()
        other.join(0.2)
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", reap)
    assert not dead.is_running()
    other.join()
    assert signal.SIGUSR1 not in sent
