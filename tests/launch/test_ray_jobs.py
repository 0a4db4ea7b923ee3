"""Jobs on Ray, with real ranks and samplers: placed, refused, equal to the same job without Ray, and disturbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.core.subprocess import descendants
from tests.launch.several import DDP, Job, gone, wait_until
from tests.launch.test_sampled_runs import SMALL, Sampled
from tests.ray_cluster import Cluster, cluster

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SFT = ("+recipe=sft_demo", *DDP, "tracker=none", "launch.devices=2", "evaluation.every=0")
LONG = (*SFT, "steps=500", "launch=ray", "launch.attempts=1")
GRPO = (*SMALL, *DDP, "launch.devices=2", "steps=6")
NOBODY_LEFT_S = 30.0  # for Ray's processes to notice, on a machine that is busy


@pytest.fixture(scope="module")
def npus() -> Iterator[Cluster]:
    """Two nodes that declare eight NPUs which nobody has."""
    with cluster({"num_cpus": 4, "resources": {"NPU": 5}}, {"num_cpus": 4, "resources": {"NPU": 3}}) as one:
        yield one


def below(process: subprocess.Popen[bytes], name: str = "") -> list[int]:
    """Every process of a job, Ray's with it; those that have `name` among their words."""
    found = [process.pid, *(one.pid for one in descendants(process.pid))]
    return [pid for pid in found if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")]


def files_of(pids: list[int]) -> set[Path]:
    """The files in memory that these processes have open to one another, and the folder of a cluster of their own."""
    found = set()
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/maps").read_text()
        found |= {Path(name) for name in re.findall(r"/tmp/run-ray-\w+|/dev/shm/[^ \n]+", words)}
    return found


def treated(pid: int) -> tuple[int, int]:
    """A process's niceness, and how readily the kernel ends it where memory is short."""
    return os.getpriority(os.PRIO_PROCESS, pid), int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def nothing_left(pids: list[int], files: set[Path]) -> bool:
    """Whether everything that a job has started is gone, in time."""
    return gone(pids, NOBODY_LEFT_S) and not [path for path in files if path.exists()]


def test_a_job_on_ray_is_the_same_job_whatever_is_killed(tmp_path: Path) -> None:
    """Bit-equal; a sampler that is killed is replaced, and a rank that is killed begins the next attempt."""
    (tmp_path / "local").mkdir()
    (tmp_path / "ray").mkdir()
    local, one = Sampled(tmp_path / "local"), Sampled(tmp_path / "ray")
    local.run(*GRPO)
    process = one.start(*GRPO, "launch=ray", "launch.samplers=1")
    wait_until(lambda: one.steps() >= 1, process)
    os.kill(one.samplers()[0], signal.SIGKILL)
    wait_until(lambda: one.steps() >= 3, process)
    everything, files = below(process), files_of(below(process))
    os.kill(one.pids()[1], signal.SIGKILL)
    assert process.wait(300) == 0, one.said()
    assert one.end(6) == local.end(6) and one.leftovers() == []
    said = one.said()
    assert "sampler 0 was killed (SIGKILL); restarting it (1 of 3)" in said
    assert "attempt 1 ended: rank 1 of 2 was killed (SIGKILL)" in said
    assert "3 cores (2 to train, 1 to sample) in one placement group" in said
    assert nothing_left(everything, files)


@pytest.mark.parametrize(
    "victim",
    [
        "runner.launch.ray.driver",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("runner.launch.ray.driver_connection", "ray::WorkerActor", "the launcher")
        ),
    ],
)
def test_whoever_is_killed_nothing_is_left(victim: str, tmp_path: Path) -> None:
    job = Job(tmp_path)
    process = job.start(*LONG)
    wait_until(lambda: job.steps() >= 1, process)
    everything, files = below(process), files_of(below(process))
    assert [treated(pid) for pid in job.pids()] == [treated(process.pid)] * 2, "as under launch=local"
    begin = time.monotonic()
    os.kill(process.pid if victim == "the launcher" else below(process, victim)[-1], signal.SIGKILL)
    code = process.wait(60)
    assert len(everything) > 8 and files and nothing_left(everything, files)
    if victim == "the launcher":
        return
    assert code == 75 and time.monotonic() - begin < 30
    assert ("its actor on" if "ray::" in victim else "Ray's driver exited") in job.said()
    assert "continue: run resume latest" in job.said()


def test_six_and_two_npus_are_reserved_and_printed_and_then_it_is_the_ranks_that_refuse(
    npus: Cluster, tmp_path: Path
) -> None:
    said = Job(tmp_path).run("+recipe=grpo_npu", f"launch.address={npus.address}", code=2)
    assert "8 NPUs (6 to train, 2 to sample) in one placement group" in said
    assert "NPU 0, 1, 2, 3, 4" in said and "samplers" in said
    assert "this machine is not ready for an Ascend NPU" in said, "of the ranks' machines, which said it once"
    assert said.count("run doctor device=npu") == 1 and "Failed to detect" not in said


def test_what_cannot_be_placed_is_refused_at_once(npus: Cluster, tmp_path: Path) -> None:
    at = f"launch.address={npus.address}"
    said = Job(tmp_path).run("+recipe=grpo_npu", at, "launch.devices=7", code=2)
    had = f"needs 9 NPUs (7 to train, 2 to sample), but Ray at {npus.address} has 8 NPUs on 2 nodes"
    assert any(f"{had} ({nodes})" in said for nodes in ("5 + 3", "3 + 5")), "in Ray's order"
    found = ("+recipe=grpo_npu", "launch.address=auto", "device=cuda")
    said = Job(tmp_path, "auto.txt").run(*found, code=2, RAY_ADDRESS=npus.address)
    assert "needs 8 GPUs (6 to train, 2 to sample), but Ray at auto has no GPU on 2 nodes" in said
    assert "in one placement group" not in said


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
    assert " was lost: its " in job.said() and gone(job.pids())
