"""Jobs of several ranks as their user sees them: real processes, killed, stopped, interrupted, on two "machines"."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests import command
from tests.launch.several import DDP, DEADLINE_S, Job, gone, wait_until
from tests.ports import free_port
from tests.small import UNJUDGED

pytestmark = pytest.mark.timeout(400)  # several processes share few cores

TWO = (*UNJUDGED, *DDP, "launch.devices=2")
LONG = ("steps=100000", "checkpoint.every=20")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.slow
def test_a_process_per_device_which_leave_one_run_that_goes_on_in_one(job: Job) -> None:
    out = job.run(*TWO, "steps=4", "checkpoint.every=2")
    assert out.count("done      4 steps") == 1 and out.count("folder   ") == 1
    assert [row["step"] for row in job.curve()] == [1, 2, 3, 4]
    ranks = json.loads((job.latest / "manifest.json").read_text())["ranks"]
    assert [rank["local_rank"] for rank in ranks] == [0, 1] and len({rank["pid"] for rank in ranks}) == 2
    assert job.status()["state"] == "done" and " 4/4 " in (job.latest / "ranks" / "1.log").read_text()
    resumed = command.run("resume", "latest", "launch.devices=1", "parallelism=single", "steps=6", cwd=job.cwd)
    assert re.search("not bit for bit: mesh was dp_replicate=2, now one process", resumed)
    assert "resume   after step 4 of 6" in resumed and job.curve()[-1]["step"] == 6
    assert yaml.safe_load((job.latest / "spec.yaml").read_text())["launch"]["devices"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_rank_ends_the_job_which_goes_on_exactly(job: Job, tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    four = (*UNJUDGED, *DDP, "launch.devices=4")
    process = job.start(*four, *LONG)
    wait_until(lambda: job.steps() > 25, process)
    pids, victim = job.pids(), moments.randrange(4)
    time.sleep(moments.random())
    os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    assert process.wait(30) == 75 and time.monotonic() - began < 20, job.said()
    assert gone(pids)
    assert f"error: rank {victim} of 4 was killed (SIGKILL)" in job.said() and "run resume latest" in job.said()
    assert job.said().count("error: ") == 1 and "Traceback" not in job.said()
    assert (job.status()["state"], job.status()["exit_code"]) == ("failed", 75)
    reached = job.steps()
    again = job.start("resume", "latest")
    wait_until(lambda: job.steps() > reached + 20, again)
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == 143, job.said()
    last = job.curve()[-1]["step"]
    (tmp_path / "peaceful").mkdir()
    peaceful = Job(tmp_path / "peaceful")
    peaceful.run(*four, f"steps={last}", "checkpoint.every=20")
    assert peaceful.curve() == job.curve() and peaceful.weights(last) == job.weights(last)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_stops_all_at_the_same_step(job: Job, number: int, code: int) -> None:
    process = job.start(*TWO, *LONG)
    wait_until(lambda: job.steps() > 5, process)
    pids = job.pids()
    process.send_signal(number)
    assert process.wait(60) == code and gone(pids)
    last = job.curve()[-1]["step"]
    assert job.weights(last), "the step it stopped at was saved"
    name = signal.Signals(number).name
    assert job.said().count(f"{name}: finishing this step, then saving") == 1
    assert f"{name} after step {last} of 100000; a checkpoint was written\ncontinue  run resume latest" in job.said()
    assert "error" not in job.said() and job.status()["state"] == "interrupted"


@pytest.mark.slow
def test_a_signal_while_it_is_built_ends_it_soon(job: Job) -> None:
    process = job.start(*TWO, *LONG)
    wait_until(lambda: "folder   " in job.said(), process)  # rank 0 has begun; a machine under load takes its time
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and "before the first step ended" in job.said(), job.said()


@pytest.mark.slow
def test_the_ranks_of_a_killed_launcher_end(job: Job) -> None:
    process = job.start(*TWO, *LONG)
    wait_until(lambda: job.steps() > 5, process)
    pids = job.pids()
    process.kill()
    assert process.wait() == -signal.SIGKILL and gone(pids)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_with_the_stacks_of_all(job: Job) -> None:
    process = job.start(*TWO, *LONG, "parallelism.timeout_s=6")
    wait_until(lambda: job.steps() > 5, process)
    pids = job.pids()
    os.kill(pids[1], signal.SIGSTOP)
    assert process.wait(60) == 6 and gone(pids), job.said()
    assert "error: rank 1 of 2 does not respond; the others waited 6 s" in job.said()
    assert "and is stopped (SIGSTOP)" in job.said() and "continue: run resume latest" in job.said()


@pytest.mark.slow
def test_data_that_is_wrong_is_said_once(job: Job) -> None:
    (job.cwd / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 7}\n')
    words = ("+recipe=sft_demo", "data=file", "data.path=data.jsonl", "tracker=none", *DDP, "launch.devices=2")
    out = job.run(*words, code=3)
    assert out.count("error: ") == 1 and "data.jsonl" in out and "rank " not in out


@pytest.mark.slow
def test_two_machines_run_one_job_and_one_ends_with_the_other(job: Job, tmp_path: Path) -> None:
    other = Job(tmp_path, "other.txt")
    words = (*TWO, *LONG, "launch.nodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}", "parallelism.timeout_s=60")
    second = other.start(*words, "launch.node_rank=1")
    first = job.start(*words, "launch.node_rank=0")
    wait_until(lambda: job.steps() > 5, first)
    pids = job.pids()
    assert len(set(pids)) == 4
    os.kill(pids[3], signal.SIGKILL)
    assert (first.wait(60), second.wait(60)) == (75, 75) and gone(pids)
    for said in (job.said(), other.said()):
        assert "error: rank 3 of 4 was killed (SIGKILL)" in said and said.count("error: ") == 1
    second = other.start("resume", "latest", "launch.node_rank=1")
    first = job.start("resume", "latest", "launch.node_rank=0")
    reached = job.steps()
    wait_until(lambda: job.steps() > reached + 5, first)
    second.send_signal(signal.SIGTERM)
    assert (first.wait(60), second.wait(60)) == (143, 143), job.said() + other.said()
    assert job.status()["state"] == "interrupted"


@pytest.mark.slow
def test_inside_torchrun_it_is_a_rank(job: Job) -> None:
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner")
    process = job.start(*UNJUDGED, *DDP, "steps=4", "checkpoint.every=2", program=program)
    assert process.wait(DEADLINE_S) == 0, job.said()
    assert job.said().count("done      4 steps") == 1 and len(job.pids()) == 2
    assert yaml.safe_load((job.latest / "spec.yaml").read_text())["launch"]["devices"] == 2
    process = job.start("resume", "latest", "steps=6", program=program)
    assert process.wait(DEADLINE_S) == 0 and "resume   after step 4 of 6" in job.said(), job.said()
    plain = Job(job.cwd / "plain")
    plain.cwd.mkdir()
    plain.run(*TWO, "steps=6", "checkpoint.every=2")
    assert plain.curve() == job.curve(), "the same ranks, whoever starts them"


@pytest.mark.slow
def test_a_mistake_inside_torchrun_ends_all_ranks_and_is_said_once(job: Job) -> None:
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner")
    process = job.start(*UNJUDGED, *DDP, "optimizer.lr=-1", program=program)
    assert process.wait(DEADLINE_S) != 0 and job.said().count("error: the job spec has 1 problem") == 1, job.said()
    process = job.start(*UNJUDGED, *DDP, "launch.devices=3", program=program)
    assert process.wait(DEADLINE_S) != 0 and "torchrun started 2 × 1 processes" in job.said()
