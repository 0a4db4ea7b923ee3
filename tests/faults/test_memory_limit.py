"""Runs inside a control group whose memory is limited: the kernel kills what exceeds it, and a command says so.

A process that the kernel kills says nothing. The command of several processes sees it; of a single one, the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command import TIMEOUT_S, Command, run
from tests.small import UNJUDGED

GROUPS = Path("/sys/fs/cgroup/memory")  # version 1
SMALL = (*UNJUDGED, "checkpoint.every=1")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group of our own, of 300 MB: less than torch needs."""
    group = GROUPS / f"runner-tests-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_the_command_after_a_killed_run_says_so(tmp_path: Path) -> None:
    printed = tmp_path / "printed.txt"
    # A save in the background may find the job at its next step.
    words = (*SMALL, "steps=3", "checkpoint.asynchronous=false")
    killed = Command(*words, cwd=tmp_path, printed=printed, RUNNER_FAILPOINT="checkpoint.before_rename:kill")
    assert killed.wait(TIMEOUT_S) == -9 and killed.said().endswith("\n")
    folder = os.path.relpath((tmp_path / "outputs/latest").resolve(), tmp_path)
    note = f"note: {folder} was killed at step 1 of 3: by kill -9, or by the kernel for memory"
    assert note in run(*words, cwd=tmp_path)
    assert note in run("resume", folder, cwd=tmp_path)
    assert "note: " not in run("resume", folder, "steps=4", cwd=tmp_path)


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_memory_ends_the_job(limited: Path, tmp_path: Path) -> None:
    ranks = ("parallelism=ddp", "launch.devices=2", "steps=2")
    script = f'echo $$ > {limited}/cgroup.procs; exec "$@"'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "runner", *SMALL, *ranks]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 75 and "killed (SIGKILL)" in done.stderr, (done.returncode, done.stderr)
