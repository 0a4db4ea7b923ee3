"""Sweeps on Slurm: its own, where there is one (slow), and a stand-in that runs batch scripts as real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.core.device_kinds import ResourceRequest
from runner.core.errors import EnvironmentProblem
from runner.launch.slurm.commands import FINISHED_STATES, error_text, parse_card_numbers
from runner.sweep import commands
from runner.sweep.commands import make_executor
from runner.sweep.config import SweepConfig
from runner.sweep.job import JobAttempt
from runner.sweep.plan import SweepFolder
from runner.sweep.slurm_executor import QueueEntry, SlurmExecutor, array_spec, read_queue, submitit_options
from tests.sweep import slurm_stand_in, toy

pytest.importorskip("submitit", reason="the extra slurm is not installed")
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200.0


def is_up() -> bool:
    """Whether this machine submits to a Slurm that answers."""
    found = shutil.which("sinfo")
    return found is not None and subprocess.run([found], capture_output=True, check=False).returncode == 0


@pytest.fixture(params=["stand-in", pytest.param("slurm", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "slurm":
        if not is_up():
            pytest.skip("no Slurm answers here")
        yield "slurm"
        return
    commands, state = slurm_stand_in.install(tmp_path / "bin"), tmp_path / "slurm"
    state.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(state))
    yield "stand-in"
    slurm_stand_in.end_all(state)
    assert [path.read_text() for path in state.glob("*/errors") if path.stat().st_size] == []


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def sweep_process(tmp_path: Path, cluster: str) -> Iterator[Start]:
    """A sweep in a process of its own, which can be interrupted and killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(names: list[str], **options: object) -> Any:
        given = json.dumps({"on": "slurm", **options})
        command = [sys.executable, "-m", "tests.sweep.toy", str(tmp_path), "start", ",".join(names), given]
        started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(happened: Callable[[], object], what: str = "") -> None:
    end = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < end, what or "nothing happened before the deadline"
        time.sleep(0.02)


def only_sweep(where: Path) -> SweepFolder:
    [root] = [path.parent for path in where.glob("*/sweep.json") if not path.parent.is_symlink()]
    return SweepFolder(root)


def runs(where: Path, index: int) -> bool:
    """Whether a job has made its first step."""
    return bool(list(where.glob(f"*-toy-*/{index:03}/metrics.jsonl")))


def in_slurm(folder: SweepFolder) -> dict[int, tuple[str, QueueEntry]]:
    """What Slurm has of a sweep: job → its name there, its state."""
    return {index: (f"{entry.array}_{index}", entry) for (_, index), entry in read_queue(folder.root.name).items()}


def goes_on(folder: SweepFolder) -> bool:
    return any(entry.state not in FINISHED_STATES for _, entry in in_slurm(folder).values())


def at_once(folder: SweepFolder, jobs: int) -> int:
    """The most jobs that ran at the same time, by their notes."""
    notes = [json.loads(folder.note(index).read_text()) for index in range(jobs)]
    return max(sum(one["began"] <= other["began"] < one["ended"] for one in notes) for other in notes)


def resume(
    folder: SweepFolder, names: list[str], wanted: commands.ResumeSelection | None = None, **options: object
) -> int:
    return toy.resume(folder, names, wanted, on="slurm", **options)


def test_one_that_fails_stops_no_other(
    tmp_path: Path, cluster: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.time_out_only(9, monkeypatch)
    names = ["good"] * 3 + ["raises"] + ["good"] * 3 + ["dies", "exits", "hangs"] + ["good"] * 2
    folder, code = toy.start(tmp_path, names, on="slurm", parallel=2, timeout_s=1.0, grace_s=0.3)
    states = ["done"] * 3 + ["failed"] + ["done"] * 3 + ["killed", "failed", "timeout"] + ["done"] * 2
    assert (code, toy.states(folder)) == (9, states)
    starts = [toy.starts(folder, index) for index in range(12)]
    assert starts[:9] + starts[10:] == [1] * 11 and starts[9] <= 1, "the limit may come before its first line"
    errors = {index: str(job.error) for index, job in enumerate(toy.jobs(folder)) if job.error}
    assert errors[3] == "exit code 1: ValueError: no such number"
    assert (errors[7], errors[8]) == ("killed by SIGKILL", "exit code 3: giving up")
    assert "not finished after 1 s" in errors[9]
    assert "4 of 12 jobs failed" in capfd.readouterr().err
    assert at_once(folder, 12) <= 2
    assert len(list((folder.root / "slurm").glob("*_submission.sh"))) == 1, "one array"


def test_a_sweep_that_is_killed_loses_nothing_and_its_jobs_go_on(
    tmp_path: Path, sweep_process: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["good", "raises", "saves", "good", "good"]
    process = sweep_process(names, parallel=1)
    until(lambda: runs(tmp_path, 2) and toy.states(only_sweep(tmp_path))[2] == "running")  # recorded after it has begun
    process.kill()
    process.wait()
    folder = only_sweep(tmp_path)
    capfd.readouterr()
    assert commands.print_status(str(folder.root)) == 0
    told = capfd.readouterr().out
    assert "1 done, 1 failed" in told and "job 2  on" in told and "job 3  in Slurm: JobArrayTaskLimit" in told
    (folder.run(2).root / "go").touch()
    until(lambda: not goes_on(folder), "the jobs ended with their sweep")
    assert resume(folder, names, parallel=1) == 9
    assert toy.states(folder) == ["done", "failed", "done", "done", "done"]
    assert [toy.starts(folder, index) for index in range(5)] == [1] * 5
    assert resume(folder, ["good"] * 5, commands.ResumeSelection(retry_failed=True)) == 0
    assert [toy.starts(folder, index) for index in range(5)] == [1, 2, 1, 1, 1]


STILL = "job 0, 1 of the previous sweep process"


@pytest.mark.slow
def test_a_resume_takes_up_what_still_runs_and_what_waits(tmp_path: Path, sweep_process: Start) -> None:
    names = ["saves", "good"]
    process = sweep_process(names, parallel=1)
    until(lambda: runs(tmp_path, 0))
    process.kill()
    process.wait()
    folder = only_sweep(tmp_path)
    [script] = (folder.root / "slurm").glob("*_submission.sh")
    script.unlink()  # as if it had died before submitit had renamed it after the array's number
    go = threading.Thread(
        target=lambda: until(lambda: STILL in folder.log.read_text()) or (folder.run(0).root / "go").touch()
    )
    go.start()
    assert resume(folder, names, parallel=1) == 0
    go.join()
    assert [toy.starts(folder, index) for index in range(2)] == [1, 1]


@pytest.mark.slow
def test_no_more_at_once_where_some_jobs_are_taken_up_and_others_started(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process(["raises", "saves"], parallel=1)
    until(lambda: runs(tmp_path, 1) and "failed" in toy.states(only_sweep(tmp_path)))
    process.kill()
    process.wait()
    folder = only_sweep(tmp_path)
    (folder.run(1).root / "go").touch()
    assert resume(folder, ["good", "saves"], commands.ResumeSelection(retry_failed=True), parallel=1) == 0
    assert at_once(folder, 2) == 1 and toy.starts(folder, 1) == 1


@pytest.mark.slow
def test_ctrl_c_lets_jobs_save_and_withdraws_those_that_wait(tmp_path: Path, sweep_process: Start) -> None:
    names = ["saves", "good"]
    process = sweep_process(names, parallel=1)
    until(lambda: runs(tmp_path, 0))
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    folder = only_sweep(tmp_path)
    assert toy.states(folder) == ["interrupted", "interrupted"] and not goes_on(folder)
    assert '"step": 9' in folder.run(0).metrics.read_text()
    assert resume(folder, names) == 0
    assert [toy.starts(folder, index) for index in range(2)] == [2, 1]


@pytest.mark.slow
def test_a_second_ctrl_c_cancels(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process(["hangs"])
    until(lambda: runs(tmp_path, 0))
    process.send_signal(signal.SIGINT)
    until(lambda: "Ctrl-C again kills them" in only_sweep(tmp_path).log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert toy.states(only_sweep(tmp_path)) == ["interrupted"] and not goes_on(only_sweep(tmp_path))


def test_a_requeued_job_goes_on(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process(["saves"])
    until(lambda: runs(tmp_path, 0))
    folder = only_sweep(tmp_path)
    name = in_slurm(folder)[0][0]
    subprocess.run(["scontrol", "requeue", name], check=True)
    hurry(folder, name)
    assert process.wait(DEADLINE_S) == 0
    assert (toy.states(folder), toy.starts(folder, 0), toy.jobs(folder)[0].attempts) == (["done"], 2, 1)
    assert '"step": 9' in folder.run(0).metrics.read_text(), "it was not told to save"


def hurry(folder: SweepFolder, name: str) -> None:
    """Slurm waits two minutes before it starts a job again; within the second of its end it may refuse to."""
    until(lambda: in_slurm(folder)[0][1].state == "PENDING" or toy.starts(folder, 0) > 1, "it was not requeued")
    time.sleep(0.0 if "STAND_IN" in os.environ else 2.0)
    subprocess.run(["scontrol", "update", f"jobid={name}", "starttime=now"], check=False, capture_output=True)


@pytest.mark.slow
def test_at_slurms_own_time_limit_a_job_saves_and_queues_again(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process(["saves"])
    until(lambda: runs(tmp_path, 0))
    folder = only_sweep(tmp_path)
    name = in_slurm(folder)[0][0]
    subprocess.run(["scancel", "--batch", "--signal=USR2", name], check=True)  # what --signal=B:USR2@… does
    hurry(folder, name)
    assert process.wait(DEADLINE_S) == 0
    assert (toy.states(folder), toy.starts(folder, 0)) == (["done"], 2)


@pytest.mark.slow
def test_a_job_that_makes_no_step_within_slurms_limit_is_not_started_for_ever(
    tmp_path: Path, sweep_process: Start
) -> None:
    process = sweep_process(["sleeps"])
    until(lambda: list(tmp_path.glob("*-toy-*/000/starts")))
    subprocess.run(["scancel", "--batch", "--signal=USR2", in_slurm(only_sweep(tmp_path))[0][0]], check=True)
    assert process.wait(DEADLINE_S) == 9
    [job] = toy.jobs(only_sweep(tmp_path))
    assert job.state == "timeout" and "no step" in str(job.error)


@pytest.mark.slow
def test_time_limits_hold_while_the_sweep_is_away(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process(["hangs"], timeout_s=1.0, grace_s=0.3)
    until(lambda: runs(tmp_path, 0))
    process.kill()
    process.wait()
    folder = only_sweep(tmp_path)
    until(lambda: not goes_on(folder), "nobody stopped it")
    assert resume(folder, ["hangs"], retries=1, retry_wait_s=0.05) == 9
    assert toy.states(folder) == ["timeout"] and toy.starts(folder, 0) == 1


@pytest.mark.slow
def test_what_is_cancelled_behind_our_back_is_run_by_a_resume(tmp_path: Path, sweep_process: Start) -> None:
    names = ["saves", "good"]
    process = sweep_process(names, parallel=1)
    until(lambda: runs(tmp_path, 0))
    folder = only_sweep(tmp_path)
    found = in_slurm(folder)
    for index in (1, 0):  # what waits first, or it would start in the other's place
        subprocess.run(["scancel", found[index][0]], check=True)
    assert process.wait(DEADLINE_S) == 9
    assert [job.error for job in toy.jobs(folder)] == ["cancelled in Slurm"] * 2
    assert '"step": 9' in folder.run(0).metrics.read_text()
    assert resume(folder, names) == 0


def test_what_slurm_refuses_is_said_in_its_words_before_anything_is_made(
    tmp_path: Path, cluster: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for options, need, said in (
        ({"partition": "nope"}, ResourceRequest(), "Invalid partition name specified"),
        ({}, ResourceRequest("npu", 99), "Requested node configuration is not available"),
    ):
        _, code = toy.start(tmp_path, ["good"], need, on="slurm", **options)
        assert code == 2
        err = capfd.readouterr().err
        assert f"Slurm rejects a job with {need}" in err and said in err
    assert not list(tmp_path.glob("*-toy-*/state.json"))


def test_where_slurm_refuses_one_array_the_jobs_of_another_are_still_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_npus(need: ResourceRequest, *_: object) -> str:
        if need.kind == "npu":
            raise EnvironmentProblem("Slurm rejects the jobs")
        return "17"

    executor = SlurmExecutor(SweepConfig(on="slurm"))
    monkeypatch.setattr(executor, "_sbatch", refuse_npus)
    paths = {"run": "", "log": "", "place": "", "note": str(tmp_path / "jobs" / "note.json")}
    taken, refused = (
        executor.submit(ResourceRequest(kind), JobAttempt(index, f"t{index}", (), (), grace_s=1.0, **paths))  # type: ignore[arg-type]
        for index, kind in enumerate(("core", "npu"))
    )
    with pytest.raises(EnvironmentProblem, match="Slurm rejects the jobs"):
        executor.poll()
    for job in (taken, refused):
        job.signal(signal.SIGTERM)
    assert (taken.exit_code, refused.exit_code) == (None, -signal.SIGTERM)
    assert executor._signals == [(taken, signal.SIGTERM)]


def test_an_npu_job_sees_the_cards_that_slurm_gave_it(tmp_path: Path, cluster: str) -> None:
    folder, code = toy.start(tmp_path, ["cards"], ResourceRequest("npu", 2), on="slurm")
    assert code == 0
    seen = json.loads(folder.run(0).metrics.read_text().splitlines()[0])["cards"]
    assert seen == ("1,2" if cluster == "stand-in" else "0,1")
    assert [device.rpartition(":")[2] for device in toy.jobs(folder)[0].devices] == seen.split(",")


@pytest.mark.slow
def test_a_search_asks_for_a_job_when_there_is_room(tmp_path: Path, cluster: str) -> None:
    folder, code = toy.search(tmp_path, ["curve"], on="slurm", trials=4, parallel=2, sampler="random")
    assert (code, toy.states(folder)) == (0, ["done"] * 4)
    assert at_once(folder, 4) <= 2 and len(list((folder.root / "slurm").glob("*_submission.sh"))) >= 2


def test_without_slurm_it_says_where_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match="scontrol is not installed; run this on a login node"):
        make_executor(SweepConfig(on="slurm")).__enter__()


def test_what_a_job_asks_for() -> None:
    options = SweepConfig(
        on="slurm", partition="big", account="lab", gres="gpu:a100", cpus=8, timeout_s=3600, sbatch={"mem": "64G"}
    )
    asked = submitit_options(options, ResourceRequest("cuda", 4))
    assert (asked["partition"], asked["account"], asked["gres"]) == ("big", "lab", "gpu:a100:4")
    assert (asked["nodes"], asked["cpus_per_task"], asked["time"]) == (1, 8, 62)  # 60 min, 60 s to save, a minute more
    assert asked["additional_parameters"]["mem"] == "64G"
    plain = submitit_options(SweepConfig(on="slurm"), ResourceRequest("core", 3))
    assert (plain["gres"], plain["cpus_per_task"], plain["time"]) == (None, 3, None)
    cards = submitit_options(SweepConfig(on="slurm"), ResourceRequest("npu", 2))
    assert (cards["gres"], cards["cpus_per_task"]) == ("npu:2", None)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"partition": "x"}, "sweep.partition"),
        ({"on": "slurm", "sbatch": {"array": "0-3"}}, "sweep.sbatch"),
        ({"on": "slurm", "sbatch": {"cpus_per_task": 2}}, "sweep.sbatch"),
        ({"on": "slurm", "sbatch": {"exclusive": False}}, "sweep.sbatch"),
        ({"on": "slurm", "sbatch": {"time": 5}, "timeout_s": 9}, "sweep.sbatch"),
        ({"on": "slurm", "search": "optuna", "trials": 3}, "sweep.parallel"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], key: str) -> None:
    assert [found for found, _ in SweepConfig.model_validate(options).problems(None)] == [key]


def test_numbers_in_slurms_manner() -> None:
    assert array_spec([0, 1, 2, 7], 2) == "0-2,7%2" and array_spec([3], None) == "3"
    assert parse_card_numbers("Nodes=a CPU_IDs=0 Mem=0 GRES=npu:910b:3(IDX:0-1,5)", "npu") == [0, 1, 5]
    assert parse_card_numbers("GRES=gpu:1(IDX:0),npu:2(IDX:4-5)", "npu") == [4, 5]
    assert parse_card_numbers("GRES=npu:2", "npu") == []
    said = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid"
    assert error_text("sbatch", said) == "sbatch: invalid partition specified: x; Batch job submission failed: Invalid"
