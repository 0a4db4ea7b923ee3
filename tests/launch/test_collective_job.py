"""A job on a cluster, whose sampler believes that it is on another machine: its weights come by collective."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launch.several import ROOT, wait_until
from tests.launch.test_sampled_runs import SMALL, Sampled
from tests.ray_cluster import cluster

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
# run by Python itself at the start of every process that has the folder in its path
ELSEWHERE = """
import sys
if "runner.launch.sampler_main" in sys.orig_argv:
    from pathlib import Path
    from runner.core import rank_info
    rank_info.BOOT = Path(__file__).with_name("boot_id_of_another_machine")
"""


def test_a_job_whose_weights_go_by_collective_is_the_same_job(tmp_path: Path) -> None:
    """Bit-equal to the same job with weights in files, with a sampler killed on the way."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ELSEWHERE)
    (site / "boot_id_of_another_machine").write_text("1234")
    (tmp_path / "files").mkdir()
    (tmp_path / "far").mkdir()
    words = (*SMALL, f"steps={STEPS}", "launch.samplers=1", "device=cpu")
    files, far = Sampled(tmp_path / "files"), Sampled(tmp_path / "far")
    files.run(*words)
    with cluster({"num_cpus": 4}) as one:
        where = ("launch=ray", f"launch.address={one.address}", "sampler.weight_transfer_backend=collective")
        process = far.start(*words, *where, PYTHONPATH=f"{site}{os.pathsep}{ROOT}")
        wait_until(lambda: far.steps() >= 2, process)
        [note] = (far.latest / "samplers").glob("*.json")
        assert json.loads(note.read_text())["boot_id"] == "1234", "so that no files are mapped, and none goes over HTTP"
        os.kill(far.samplers()[0], signal.SIGKILL)
        assert process.wait(300) == 0, far.said()
    assert far.end(STEPS) == files.end(STEPS) and far.leftovers() == []
