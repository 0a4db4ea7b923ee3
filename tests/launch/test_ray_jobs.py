"""Jobs on Ray, with real ranks and samplers: placed, refused, equal to the same job without Ray, and disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.tracker.processes import descendants
from tests.launch.several import Job, gone, wait_until
from tests.ray_cluster import Cluster, cluster

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SFT = ("+recipe=sft_demo", "tracker=none", "parallelism=ddp", "launch.devices=2", "evaluation.every=0")
LONG = (*SFT, "steps=500", "launch=ray", "launch.attempts=1")
GRPO = (
    *("+recipe=grpo_demo", "init_from=null", "tracker=none", "parallelism=ddp", "launch.devices=2"),
    *("launch.samplers=1", "steps=4", "checkpoint.every=1", "evaluation.every=0", "algorithm.batch_size=8"),
    *("algorithm.group_size=4", "reward=length", "reward.target=4"),
)
NOBODY_LEFT_S = 30.0  # for Ray's processes to notice, on a machine that is busy


@pytest.fixture(scope="module")
def npus() -> Iterator[Cluster]:
    """Two nodes that declare eight NPUs which nobody has."""
    with cluster({"num_cpus": 4, "resources": {"NPU": 5}}, {"num_cpus": 4, "resources": {"NPU": 3}}) as one:
        yield one


def what_is_there() -> set[Path]:
    """Files in memory, and Ray's folders."""
    return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("run-ray-*")}


def below(process: subprocess.Popen[bytes], name: str = "") -> list[int]:
    """Every process of a job, Ray's with it; those that have `name` among their words."""
    found = [process.pid, *(one.pid for one in descendants(process.pid))]
    return [pid for pid in found if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")]


def nothing_left(before: set[Path], pids: list[int]) -> bool:
    """Whether everything that a job has started is gone, in time."""
    end = time.monotonic() + NOBODY_LEFT_S
    while what_is_there() - before and time.monotonic() < end:
        time.sleep(0.1)
    return not what_is_there() - before and gone(pids, NOBODY_LEFT_S)


def test_a_job_on_ray_is_the_same_job_whatever_is_killed(tmp_path: Path) -> None:
    """Bit-equal; a sampler that is killed is replaced, and a rank that is killed begins the next attempt."""
    before = what_is_there()
    (tmp_path / "local").mkdir()
    (tmp_path / "ray").mkdir()
    local, one = Job(tmp_path / "local"), Job(tmp_path / "ray")
    local.run(*GRPO)
    process = one.start(*GRPO, "launch=ray")
    wait_until(lambda: one.steps() >= 1, process)
    os.kill(json.loads((one.latest / "samplers" / "0.json").read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: one.steps() >= 2, process)
    everything = below(process)
    os.kill(one.pids()[1], signal.SIGKILL)
    assert process.wait(300) == 0, one.said()
    assert one.curve() == local.curve() and one.weights(4) == local.weights(4)
    said = one.said()
    assert "sampler 0 was killed (SIGKILL); it is started anew (1 of 3)" in said
    assert "attempt 1 ended: rank 1 of 2 was killed (SIGKILL)" in said
    assert "3 cores (2 to train, 1 to sample) in one placement group" in said
    assert nothing_left(before, everything)


@pytest.mark.parametrize("victim", ["runner.launch.ray_driver", "runner.ray.guard", "ray::Attendant", "the launcher"])
def test_whoever_is_killed_nothing_is_left(victim: str, tmp_path: Path) -> None:
    before, job = what_is_there(), Job(tmp_path)
    process = job.start(*LONG)
    wait_until(lambda: job.steps() >= 1, process)
    everything = below(process)
    begin = time.monotonic()
    os.kill(process.pid if victim == "the launcher" else below(process, victim)[-1], signal.SIGKILL)
    code = process.wait(60)
    assert len(everything) > 8 and nothing_left(before, everything)
    if victim == "the launcher":
        return
    assert code == 75 and time.monotonic() - begin < 30
    assert ("its actor on" if "ray::" in victim else "Ray's driver has ended") in job.said()
    assert "go on: run resume latest" in job.said()


def test_six_and_two_npus_are_reserved_and_printed_and_then_it_is_the_ranks_that_refuse(
    npus: Cluster, tmp_path: Path
) -> None:
    said = Job(tmp_path).run("+recipe=grpo_npu", f"launch.address={npus.address}", code=2)
    assert "8 NPUs (6 to train, 2 to sample) in one placement group" in said
    assert "NPU 0, 1, 2, 3, 4" in said and "samplers" in said
    assert "this machine is not ready for an Ascend NPU" in said, "of the ranks' machines, which said it once"
    assert said.count("run doctor device=npu") == 1 and "Failed to detect" not in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("launch.devices=7",), "wants 9 NPUs (7 to train, 2 to sample), and Ray at {} has 8 NPUs on 2 nodes"),
        (("device=cuda",), "wants 8 GPUs (6 to train, 2 to sample), and Ray at {} has no GPU on 2 nodes"),
    ],
)
def test_what_cannot_be_placed_is_refused_at_once(
    words: tuple[str, ...], text: str, npus: Cluster, tmp_path: Path
) -> None:
    said = Job(tmp_path).run("+recipe=grpo_npu", f"launch.address={npus.address}", *words, code=2)
    assert text.format(npus.address) in said and "in one placement group" not in said


def test_a_full_object_store_is_no_matter_and_a_node_that_is_lost_is_said(npus: Cluster, tmp_path: Path) -> None:
    """Nothing of a job goes through the store. The last test of this cluster: it loses a node."""
    job = Job(tmp_path)
    on_both = ("device.threads=3", f"launch.address={npus.address}")  # four cores each: one rank each
    process = job.start(*LONG, *on_both)
    wait_until(lambda: job.steps() >= 2, process)
    npus.fill_store()
    at = job.steps()
    wait_until(lambda: job.steps() >= at + 3, process)
    os.kill(npus.raylets[1], signal.SIGKILL)
    assert process.wait(120) == 75
    assert " is gone: its " in job.said() and gone(job.pids())
