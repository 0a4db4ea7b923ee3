"""Jobs of two ranks that save at every step while they train on, as their user sees them: killed, interrupted."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.launch.several import DEADLINE_S, Job, wait_until
from tests.small import UNJUDGED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHARDED = (*UNJUDGED, "launch.devices=2", "parallelism=fsdp", "checkpoint.every=1")
BACKGROUND = "checkpoint.asynchronous=true"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def saved(job: Job) -> list[int]:
    """The steps whose checkpoints are there."""
    folder = job.latest / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_it_saves_leaves_what_goes_on_exactly(
    job: Job, tmp_path: Path, victim: int
) -> None:
    process = job.start(*SHARDED, "steps=100000", BACKGROUND)
    wait_until(lambda: job.steps() > random.Random(victim).randint(5, 30), process)
    os.kill(job.pids()[victim], signal.SIGKILL)
    assert process.wait(DEADLINE_S) == 75, job.said()
    reached = saved(job)[-1]
    again = job.start("resume", "latest")
    wait_until(lambda: job.steps() > reached + 3, again)
    again.send_signal(signal.SIGTERM)
    assert again.wait(DEADLINE_S) == 143, job.said()
    assert f"resume   after step {reached} of 100000" in job.said()
    last = saved(job)[-1]
    peaceful = Job(tmp_path / "peaceful")
    peaceful.cwd.mkdir()
    peaceful.run(*SHARDED, f"steps={last}")
    assert job.curve() == peaceful.curve()
    assert all(job.weights(step) == peaceful.weights(step) for step in (last - 1, last))
    assert not list((job.latest / "checkpoints").glob(".*"))


def test_a_signal_is_obeyed_when_all_is_saved(job: Job) -> None:
    process = job.start(*SHARDED, "steps=100000", BACKGROUND)
    wait_until(lambda: job.steps() > 5, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 143, job.said()
    assert f"SIGTERM after step {saved(job)[-1]} of 100000; a checkpoint was written" in job.said()
    assert not list((job.latest / "checkpoints").glob(".*"))
