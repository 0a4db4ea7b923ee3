"""Ctrl-C in a job on Ray, which blocks SIGINT in all that it starts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launch.several import Job, wait_until
from tests.launch.test_ray_jobs import LONG, below, files_of, nothing_left

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_ctrl_c_has_every_rank_save_and_end(tmp_path: Path) -> None:
    job = Job(tmp_path)
    process = job.start(*LONG)
    wait_until(lambda: job.steps() >= 2, process)
    pids = below(process)
    files = files_of(pids)
    process.send_signal(signal.SIGINT)
    assert process.wait(200) == 130, job.said()
    assert "SIGINT: finishing this step, then saving" in job.said()
    assert job.weights(job.steps())  # of the step that was in hand
    assert job.status()["state"] == "interrupted"
    assert nothing_left(pids, files)
