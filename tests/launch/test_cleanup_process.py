"""What a killed launcher leaves is cleared away: processes that it watched, and folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.core.rank_info import RankInfo
from runner.weight_sync.store_dir import store_dirs
from tests.launch.several import ROOT, alive, gone

RANK = """
import os, sys
from pathlib import Path
from runner.cli.job_builder import compose_job
from runner.core.fsync_io import temporary_folder
from runner.launch import local, session
from runner.run_dir.folder import RunFolder
from runner.weight_sync.store_dir import store_dirs

def die(own):
    for path in (own.folder.engine, temporary_folder(own.folder.engine), *store_dirs(own.folder.root)):
        path.mkdir(parents=True)
        print(path)
    sys.stdout.flush()
    os.kill(os.getpid(), 9)

session.Session.run = die
spec = compose_job(["+recipe=grpo_demo", "sampler=vllm"]).spec
local._run(spec, RunFolder(Path(sys.argv[1])), 1, {})
"""

LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from runner.launch.cleanup_process import CleanupProcess
cleanup = CleanupProcess()
cleanup.remove(Path(sys.argv[1]), Path("/nowhere"))
sleeping = [subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=True) for _ in range(2)]
for one in sleeping:
    cleanup.watch(one.pid)
cleanup.forget(sleeping[1].pid)
print(*(one.pid for one in sleeping), flush=True)
if sys.argv[2] == "close":
    cleanup.close()
else:
    os.killpg(os.getpid(), 9)
"""


def launched(folder: Path, ending: str) -> tuple[int, list[int]]:
    """How a launcher ended that has a cleanup process for `folder`, and the two groups that it had started."""
    (folder / "inner").mkdir(parents=True)
    command = [sys.executable, "-c", LAUNCHER, str(folder), ending]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True, timeout=200)
    return done.returncode, [int(pid) for pid in done.stdout.split()]


def test_a_killed_launchers_processes_end_and_its_folders_go(tmp_path: Path) -> None:
    code, [watched, forgotten] = launched(tmp_path / "weights", "kill")
    try:
        assert code == -signal.SIGKILL and gone([watched])
        assert alive([forgotten]), "its number may be another one's by now"
        end = time.monotonic() + 60
        while (tmp_path / "weights").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert not (tmp_path / "weights").exists() and tmp_path.exists()
    finally:
        os.kill(forgotten, signal.SIGKILL)


def test_a_launcher_that_ends_waits_for_it(tmp_path: Path) -> None:
    code, [watched, forgotten] = launched(tmp_path / "weights", "close")
    os.kill(forgotten, signal.SIGKILL)
    assert code == 0 and not (tmp_path / "weights").exists() and gone([watched])


@pytest.mark.parametrize("variables", [{}, RankInfo(0, 2, 0, 2).to_environment()], ids=["one process", "torchrun"])
def test_a_killed_rank_without_a_launcher_leaves_no_files_of_its_engine(
    variables: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1", **variables}
    killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, timeout=200)
    places = [Path(line) for line in killed.stdout.splitlines()]
    assert killed.returncode == -signal.SIGKILL and len(places) == 4 and store_dirs(tmp_path)[0] in places
    end = time.monotonic() + 60
    while any(place.exists() for place in places) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [place for place in places if place.exists()]
