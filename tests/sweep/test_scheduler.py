"""A sweep's jobs as real processes that behave and misbehave: what becomes of each, and of the others."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.core import subprocess as processes
from runner.core.errors import EnvironmentProblem, SpecError
from runner.run_dir.folder import RunFolder, is_locked
from runner.sweep import commands
from runner.sweep.commands import print_status
from runner.sweep.config import SweepConfig
from runner.sweep.local_executor import LocalExecutor
from runner.sweep.plan import SweepFolder, SweepState, find_sweep
from tests.sweep import toy

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200.0


def until(happened: Callable[[], object], what: str = "") -> None:
    end = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < end, what or "nothing happened before the deadline"
        time.sleep(0.01)


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def sweep_process(tmp_path: Path) -> Iterator[Start]:
    """A sweep in a process of its own, which can be interrupted and killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(action: str, names: list[str], options: str = "{}", output: int = subprocess.DEVNULL) -> Any:
        command = [sys.executable, "-m", "tests.sweep.toy", str(tmp_path), action, ",".join(names), options]
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as of most users
        started.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, **quiet))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def only_sweep(where: Path) -> SweepFolder:
    [root] = [path for path in where.iterdir() if (path / "sweep.json").exists() and not path.is_symlink()]
    return SweepFolder(root)


def resume_here(folder: SweepFolder, wanted: commands.ResumeSelection) -> int:
    """Resume a sweep that is to be refused, with the options' defaults."""
    options = SweepConfig()
    return commands.resume_sweep(*find_sweep(str(folder.root)), wanted, options, LocalExecutor(options))


def alive(pid: int) -> bool:
    return processes.process_identity(pid) is not None


def test_one_that_fails_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.time_out_only(9, monkeypatch)
    names = ["good"] * 3 + ["raises"] + ["good"] * 3 + ["dies", "exits", "hangs"] + ["good"] * 2
    folder, code = toy.start(tmp_path, names, parallel=2, timeout_s=1.0, grace_s=0.3)
    assert code == 9
    assert (
        toy.states(folder) == ["done"] * 3 + ["failed"] + ["done"] * 3 + ["killed", "failed", "timeout"] + ["done"] * 2
    )
    assert all(toy.starts(folder, index) == 1 for index in range(12))
    errors = {index: str(job.error) for index, job in enumerate(toy.jobs(folder)) if job.error}
    assert errors[3] == "exit code 1: ValueError: no such number"
    assert errors[7] == "killed by SIGKILL"
    assert errors[8] == "exit code 3: giving up"
    assert "not finished after 1 s" in errors[9]
    out, err = capfd.readouterr()
    assert "4 of 12 jobs failed" in err and "job 9  did not exit within 0.3 s: killed" in out
    assert "best     job 0  n=0  eval/loss 1 at step 1" in out
    for index in (3, 7, 8, 9):
        assert f"jobs/{index:03}.log" in out and f"--only {index}" in out
    assert "fine" in folder.output(0).read_text()


def test_no_more_at_once_than_said_and_each_on_a_core_of_its_own(tmp_path: Path) -> None:
    folder, code = toy.start(tmp_path, ["where"] * 4, parallel=1)
    assert code == 0
    assert {job.devices for job in toy.jobs(folder)} == {(str(min(os.sched_getaffinity(0))),)}
    assert '"cores": 1}' in folder.run(0).metrics.read_text()


def test_more_jobs_at_once_than_cores_share_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    count = len(os.sched_getaffinity(0)) + 1
    folder, code = toy.start(tmp_path, ["where"] * count, parallel=count)
    assert code == 0 and "which share the cores" in capfd.readouterr().out
    assert f'"cores": {count - 1}}}' in folder.run(0).metrics.read_text()


@pytest.mark.parametrize(("options", "failed"), [({"fail_fast": True}, 1), ({"max_failures": 2}, 2)])
def test_failures_can_stop_the_rest(tmp_path: Path, options: dict[str, object], failed: int) -> None:
    folder, code = toy.start(tmp_path, ["raises", "raises", "good", "good"], parallel=1, **options)
    assert code == 9
    assert toy.states(folder) == ["failed"] * failed + ["waiting"] * (2 - failed) + ["waiting"] * 2


def test_fail_fast_lets_running_jobs_save(tmp_path: Path) -> None:
    folder, code = toy.start(tmp_path, ["saves", "raises last"], parallel=2, fail_fast=True)
    assert (code, toy.states(folder)) == (9, ["interrupted", "failed"])
    assert '"step": 9' in folder.run(0).metrics.read_text()
    assert toy.resume(folder, ["saves", "good"]) == 9  # the failed one is left
    assert toy.states(folder) == ["done", "failed"]


def test_out_of_memory_is_tried_again_with_growing_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, code = toy.start(tmp_path, ["memory"], retries=2, retry_wait_s=0.05)
    assert (code, toy.states(folder), toy.starts(folder, 0)) == (0, ["done"], 3)
    assert toy.jobs(folder)[0].attempts == 3
    folder, code = toy.start(tmp_path, ["memory", "raises"], retries=1, retry_wait_s=0.05)
    assert (code, toy.states(folder)) == (9, ["failed", "failed"])
    assert (toy.starts(folder, 0), toy.starts(folder, 1)) == (2, 1)  # only what is worth it


def test_an_end_without_a_result_is_a_failure(tmp_path: Path) -> None:
    folder, code = toy.start(tmp_path, ["half", "silent"])
    assert (code, toy.states(folder)) == (9, ["failed", "failed"])
    assert "its status is running" in str(toy.jobs(folder)[0].error)
    assert "status.json is missing or unreadable" in str(toy.jobs(folder)[1].error)


def test_what_a_job_started_ends_with_it(tmp_path: Path) -> None:
    folder, _ = toy.start(tmp_path, ["parent"])
    pid = int(folder.output(0).read_text())
    until(lambda: not alive(pid))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_jobs_save_and_a_resume_goes_on(
    tmp_path: Path, sweep_process: Start, number: int, code: int
) -> None:
    names = ["good", "saves", "good"]
    process = sweep_process("start", names, '{"parallel": 1}')
    until(lambda: list(tmp_path.glob("*/001/metrics.jsonl")))
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == code
    folder = only_sweep(tmp_path)
    assert toy.states(folder) == ["done", "interrupted", "waiting"]
    assert '"step": 9' in folder.run(1).metrics.read_text()
    assert toy.resume(folder, names) == 0
    assert [toy.starts(folder, index) for index in range(3)] == [1, 2, 1]
    assert folder.table.read_text().count(",done,") == 3


def test_a_second_signal_kills(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process("start", ["hangs"])
    until(lambda: list(tmp_path.glob("*/000/metrics.jsonl")))
    process.send_signal(signal.SIGINT)
    until(lambda: "Ctrl-C again kills them" in only_sweep(tmp_path).log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert toy.states(only_sweep(tmp_path)) == ["interrupted"]


def test_a_killed_sweep_loses_nothing(tmp_path: Path, sweep_process: Start) -> None:
    names = ["good", "raises", "saves", "good", "good"]
    process = sweep_process("start", names, '{"parallel": 1}')
    until(lambda: list(tmp_path.glob("*/002/metrics.jsonl")))
    folder = only_sweep(tmp_path)
    until(lambda: toy.states(folder) == ["done", "failed", "running", "waiting", "waiting"])
    process.kill()
    process.wait()
    pid = int((folder.run(2).root / "starts").read_text())
    until(lambda: not alive(pid), "the job outlived its sweep")
    assert '"step": 9' in folder.run(2).metrics.read_text()  # it was told to save
    assert toy.resume(folder, names) == 9
    assert [toy.starts(folder, index) for index in range(5)] == [1, 1, 2, 1, 1]
    assert toy.states(folder) == ["done", "failed", "done", "done", "done"]
    assert toy.resume(folder, ["good"] * 5, commands.ResumeSelection(retry_failed=True)) == 0
    assert [toy.starts(folder, index) for index in range(5)] == [1, 2, 2, 1, 1]


def test_a_resume_waits_for_a_job_that_is_still_saving_then_kills_it(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process("start", ["hangs", "good"], '{"parallel": 1}')
    until(lambda: list(tmp_path.glob("*/000/metrics.jsonl")))
    folder = only_sweep(tmp_path)
    until(lambda: "running" in toy.states(folder))  # recorded after the job has begun
    process.kill()
    process.wait()
    pid = int((folder.run(0).root / "starts").read_text())
    assert alive(pid)
    assert toy.resume(folder, ["good", "good"], grace_s=0.2) == 0
    assert not alive(pid) and toy.starts(folder, 0) == 2


def test_what_was_handed_over_elsewhere_is_not_started_here(tmp_path: Path) -> None:
    folder, _ = toy.start(tmp_path, ["good", "raises"])
    given = {"on": "ray", "token": "t", "note": str(folder.note(1))}
    SweepState.read(folder).update(1, state="running", identity=given)
    before = folder.state.read_bytes()
    with pytest.raises(EnvironmentProblem, match=r"job 1 may still run with sweep\.on=ray; continue"):
        resume_here(folder, commands.ResumeSelection())
    assert folder.state.read_bytes() == before and toy.starts(folder, 1) == 1


def test_a_report_of_a_sweep_that_was_killed_knows_that_its_jobs_have_ended(
    tmp_path: Path, sweep_process: Start
) -> None:
    process = sweep_process("start", ["good", "saves"], '{"parallel": 1}')
    until(lambda: list(tmp_path.glob("*/001/metrics.jsonl")))
    folder = only_sweep(tmp_path)
    until(lambda: toy.states(folder) == ["done", "running"])  # which the job need not wait for
    process.kill()
    process.wait()
    pid = int((folder.run(1).root / "starts").read_text())
    until(lambda: not alive(pid))
    assert toy.states(folder) == ["done", "running"] and commands.rewrite_report(str(folder.root)) == 0
    assert [job["state"] for job in json.loads(folder.results.read_text())["jobs"]] == ["done", "interrupted"]


def test_only_names_the_jobs_and_finished_ones_are_left_alone(tmp_path: Path) -> None:
    folder, _ = toy.start(tmp_path, ["good", "raises", "raises"])
    assert toy.resume(folder, ["good"] * 3, commands.ResumeSelection(only=(2,))) == 9
    assert toy.states(folder) == ["done", "failed", "done"]
    with pytest.raises(EnvironmentProblem, match="job 0 is done"):
        resume_here(folder, commands.ResumeSelection(only=(0,)))
    with pytest.raises(EnvironmentProblem, match="the jobs are 0 to 2"):
        resume_here(folder, commands.ResumeSelection(only=(3,)))
    assert toy.resume(folder, ["raises"] * 3) == 9  # nothing is left to do, and one has failed
    assert [toy.starts(folder, index) for index in range(3)] == [1, 1, 2]


def test_a_resume_needs_room_for_what_is_left_only(tmp_path: Path) -> None:
    """A smaller machine may finish what a larger one has begun."""
    folder, _ = toy.start(tmp_path, ["good", "raises"])
    content = json.loads(folder.plan.read_text())
    content["jobs"][0]["need"]["count"] = 10_000
    folder.plan.write_text(json.dumps(content))
    assert toy.resume(folder, ["good", "good"], commands.ResumeSelection(retry_failed=True)) == 0
    assert [toy.starts(folder, index) for index in (0, 1)] == [1, 2]
    assert toy.resume(folder, ["good", "good"], parallel=3) == 0, "nothing is left"


def test_a_changed_spec_is_refused_with_what_differs(tmp_path: Path) -> None:
    folder, _ = toy.start(tmp_path, ["good", "raises"])
    folder.spec(1).write_text("n: 7\nsteps: 2\nmore: 1\n")
    with pytest.raises(SpecError) as caught:
        resume_here(folder, commands.ResumeSelection(retry_failed=True))
    text = str(caught.value)
    assert "n: was 1 when the sweep began, is 7; restore it" in text and "more: was not there" in text
    assert "jobs/001.yaml" in text


def test_one_sweep_is_run_by_one_process(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process("start", ["saves"])
    until(lambda: list(tmp_path.glob("*/000/metrics.jsonl")))
    folder = only_sweep(tmp_path)
    with pytest.raises(EnvironmentProblem, match="is running this job"):
        resume_here(folder, commands.ResumeSelection())
    lock = (folder.root / ".lock").read_bytes()
    assert print_status(str(folder.root)) == 0 and is_locked(RunFolder(folder.root))
    (folder.run(0).root / "go").touch()
    assert process.wait(DEADLINE_S) == 0
    with locked_by_who_asks(folder):
        assert not is_locked(RunFolder(folder.root)), "one who asks looked like an owner"
    assert (folder.root / ".lock").read_bytes() == lock, "who asks has written something"


@contextmanager
def locked_by_who_asks(folder: SweepFolder) -> Iterator[None]:
    """Another status, in the middle of its question."""
    with (folder.root / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def test_sweeps_of_the_same_second_do_not_meet(tmp_path: Path, sweep_process: Start) -> None:
    started = [sweep_process("start", ["good", "good"]) for _ in range(3)]
    assert [process.wait(DEADLINE_S) for process in started] == [0, 0, 0]
    folders = [SweepFolder(p) for p in tmp_path.iterdir() if not p.is_symlink() and (p / "sweep.json").exists()]
    assert len(folders) == 3
    for folder in folders:
        assert toy.states(folder) == ["done", "done"] and [toy.starts(folder, i) for i in (0, 1)] == [1, 1]
    assert (tmp_path / "latest").resolve() in [folder.root.resolve() for folder in folders]


def test_a_screen_that_goes_away_stops_nothing(tmp_path: Path, sweep_process: Start) -> None:
    process = sweep_process("start", ["saves", "good", "good"], '{"parallel": 1}', subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    until(lambda: list(tmp_path.glob("*/000/metrics.jsonl")))
    folder = only_sweep(tmp_path)
    (folder.run(0).root / "go").touch()
    assert process.wait(DEADLINE_S) == 0
    assert toy.states(folder) == ["done"] * 3 and "the terminal closed" in folder.log.read_text()


@pytest.mark.slow
def test_two_hundred_jobs_take_no_more_memory_and_time_each_than_the_first(tmp_path: Path) -> None:
    resident: list[tuple[int, float]] = []
    over = threading.Event()

    def measure() -> None:
        while not over.wait(0.1):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append((pages * os.sysconf("SC_PAGE_SIZE"), time.monotonic()))

    watching = threading.Thread(target=measure)
    watching.start()
    folder, code = toy.start(tmp_path, ["good"] * 200, parallel=2)
    over.set()
    watching.join()
    assert code == 0 and toy.states(folder) == ["done"] * 200
    done = [
        float(line.split(" done in ")[1].split()[0])
        for line in folder.log.read_text().splitlines()
        if " done in " in line
    ]
    assert sum(done[-50:]) < 2 * sum(done[:50]) + 1
    assert resident[-1][0] - resident[len(resident) // 4][0] < 5_000_000


def test_jobs_work_where_the_sweep_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, other = tmp_path / "begun", tmp_path / "other"
    begun.mkdir()
    other.mkdir()
    monkeypatch.chdir(begun)
    folder, _ = toy.start(tmp_path / "sweeps", ["raises"])
    monkeypatch.chdir(other)
    assert toy.resume(folder, ["place"], commands.ResumeSelection(retry_failed=True)) == 0
    assert folder.output(0).read_text().endswith(f"{begun}\n")
