"""A group of processes ends, and what they shared in memory goes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.tracker.processes import end_group
from tests.launch.several import gone

SHARES = """
import os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
shared = SharedMemory(create=True, size=4096)
tracker = Path(f"/proc/{resource_tracker._resource_tracker._pid}/cmdline")
while b"resource_tracker" not in tracker.read_bytes():  # until then it is a copy of this process
    time.sleep(0.001)
print(shared.name, flush=True)
if sys.argv[1] == "dead":
    os.kill(os.getpid(), 9)
time.sleep(100)
"""


@pytest.mark.parametrize("leader", ["alive", "dead"])
def test_of_a_group_that_is_killed_no_shared_memory_is_left(leader: str) -> None:
    command = [sys.executable, "-c", SHARES, leader]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        shared = Path("/dev/shm", process.stdout.readline().strip())
        if leader == "dead":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # and not reaped, as a launcher does it
        else:
            assert shared.exists()
        end_group(process.pid)
        assert gone([process.pid]) and not shared.exists()
