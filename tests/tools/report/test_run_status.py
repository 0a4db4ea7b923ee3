"""What `run status` says: of folders that are made by hand, and of a real job while it runs, stops and dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.cli.main import main
from runner.core.rank_info import Host
from runner.run_dir.folder import RunFolder, hold_lock
from runner.tools.report.run_status import RunStatus, read_run_status, status_lines
from tests.launch.several import Job, wait_until

HERE = Host.current()
THERE = {"host": "node-7", "boot_id": "another", "pid": 1}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.spec.write_text("name: x\nsteps: 200\n")
    write(run.status, {"state": "running", "attempt": 2, "pid": 17, "exit_code": None, "error": None})
    rows = [{"step": n, "perf/step_s": 0.5, "train/loss": 1 / n, "weight_sync/load_s": 0.25} for n in range(1, 41)]
    rows[9]["eval/loss"] = 0.75
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 41, "tra')
    return run


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def listed(folder: RunFolder, *members: dict[str, Any], age: float = 0.0, attempt: int = 2, machine: int = 0) -> None:
    launcher = members[0] if members else THERE
    content = {"attempt": attempt, "written": time.time() - age, "over": False, "launcher": launcher}
    each = {"role": "rank", "runs": True, "step": 40, "heard": time.time() - age, "replaced": 0, "log": "ranks/1.log"}
    named = [{**each, "name": f"rank {index} of 2", **member} for index, member in enumerate(members)]
    write(folder.members / f"{machine}.json", {**content, "members": named})


def of(pid: int, **more: Any) -> dict[str, Any]:
    return {"host": HERE.host, "boot_id": HERE.boot_id, "pid": pid, **more}


def test_how_far_it_is_and_how_fast(folder: RunFolder) -> None:
    with hold_lock(folder):
        found = read_run_status(folder)
    assert (found.state, found.step, found.steps, found.step_s, found.left_s) == ("running", 40, 200, 0.5, 80.0)
    assert found.numbers["eval/loss"] == (10, 0.75) and found.numbers["train/loss"] == (40, 0.025)
    said = "\n".join(status_lines(found))
    assert "running · attempt 2 · step 40 of 200 · 0.5 s a step · 01:20 left" in said
    assert (
        "metrics   train/loss 0.025 · eval/loss 0.75 (step 10)" in said and "samples   weight_sync/load_s 0.25" in said
    )
    assert json.loads(json.dumps(found.plain()))["numbers"]["eval/loss"] == {"step": 10, "value": 0.75}


def test_a_run_that_nobody_holds_was_killed(folder: RunFolder) -> None:
    found = read_run_status(folder)
    assert found.state == "killed" and list(status_lines(found))[-1].startswith("continue  run resume")


def test_what_the_kernel_says_of_processes_here(folder: RunFolder, sleeper: int) -> None:
    os.kill(sleeper, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper, os.WSTOPPED | os.WNOWAIT)
    listed(folder, of(os.getpid()), of(sleeper), of(2**22 + 1), of(os.getpid(), runs=False))
    with hold_lock(folder):
        found = read_run_status(folder)
    assert [member.state for member in found.members] == ["runs", "runs", "stopped", "gone", "ended"]


def test_on_another_machine_silence_is_what_is_known(folder: RunFolder) -> None:
    listed(folder, THERE, {**THERE, "replaced": 2, "name": "sampler 0", "role": "sampler", "step": None})
    fresh = read_run_status(folder)
    assert fresh.state == "running" and {member.state for member in fresh.members} == {"runs"}
    assert "restarted 2 times" in "\n".join(status_lines(fresh))
    listed(folder, THERE, age=95)
    late = read_run_status(folder)
    assert late.state == "silent" and {member.state for member in late.members} == {"silent"}


def test_who_took_part_in_an_attempt_before_does_not_count(folder: RunFolder) -> None:
    listed(folder, THERE)
    listed(folder, THERE, attempt=1, machine=1)
    assert len(read_run_status(folder).members) == 2


def test_ranks_that_nobody_watches(folder: RunFolder) -> None:
    write(folder.manifest, {"ranks": [{"host": HERE.host, "pid": 17}, {"host": "node-7", "pid": 18}]})
    found = read_run_status(folder).members
    assert [(member.name, member.pid) for member in found] == [("rank 0 of 2", 17), ("rank 1 of 2", 18)]
    assert found[1].state == "elsewhere"
    write(folder.manifest, {"ranks": [{"host": HERE.host, "pid": 16}]})
    assert read_run_status(folder).members == [], "of an attempt before"


def test_a_job_that_waits_in_slurm(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder.status, {"state": "waiting", "attempt": 0})
    write(folder.slurm / "job.json", {"job": "17", "log": "slurm/17.log"})
    monkeypatch.setattr("runner.tools.report.run_status.state_of", lambda job: ("PENDING", "Priority"))
    assert "slurm     job 17: PENDING (Priority); log slurm/17.log" in list(status_lines(read_run_status(folder)))


@pytest.fixture
def sleeper() -> Iterator[int]:
    pid = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_a_real_job_from_its_start_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path)
    words = ("+recipe=sft_demo", "parallelism=ddp", "launch.devices=2", "steps=3000", "evaluation.every=0")
    process = job.start(*words)

    def now() -> RunStatus:
        return read_run_status(RunFolder(job.latest.resolve()))

    wait_until(lambda: job.steps() > 3, process)
    wait_until(lambda: all(member.step for member in now().members if member.role == "rank"), process)
    found = now()
    assert [member.name for member in found.members] == ["launcher 0", "rank 0 of 2", "rank 1 of 2"]
    assert {member.state for member in found.members} == {"runs"} and found.members[0].pid == process.pid
    assert [member.pid for member in found.members[1:]] == job.pids()
    assert [Path(log).name for log in found.logs] == ["run.log", "1.log"]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while {member.state for member in now().members} != {"gone"} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert now().state == "killed" and {member.state for member in now().members} == {"gone"}
    assert main(["status", str(job.latest)]) == 0
    assert "killed · step" in capsys.readouterr().out
