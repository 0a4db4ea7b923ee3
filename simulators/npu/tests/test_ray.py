"""A job that Ray places on simulated NPUs, of a cluster that only declares them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.several import Job
from tests.ray_cluster import cluster

pytest.importorskip("ray")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_and_one_simulated_npus_make_two_steps(simulator: Path, tmp_path: Path) -> None:
    nodes = ({"num_cpus": 4, "resources": {"NPU": 5}}, {"num_cpus": 4, "resources": {"NPU": 3}})
    simulated = (
        "device=npu_sim",
        "device.cards=5",
        "parallelism=ddp",
        "reward=rehearsal",
        "sampler=torch",
        "sampler.max_new_tokens=32",
        "tracker=none",
    )
    with cluster(*nodes) as npus:
        where = ("launch=ray", f"launch.address={npus.address}", "launch.devices=2", "launch.samplers=1")
        said = Job(tmp_path).run("+recipe=[grpo_npu,rehearse]", *simulated, *where, RUNNER_CACHE=str(simulator))
    assert "3 NPUs (2 to train, 1 to sample) in one placement group" in said and "done      2 steps" in said
