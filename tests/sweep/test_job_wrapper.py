"""The wrapper beside a job that runs elsewhere: it forwards signals to the job, and writes how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from runner.launch.ray.driver_connection import RAY_JOB, forwarded_env
from runner.sweep.commands import print_status
from runner.sweep.config import SweepConfig
from runner.sweep.executor import RemoteJob
from runner.sweep.job import SILENT_S, JobAttempt, JobStatus, read_status
from runner.sweep.ray_executor import RayExecutor
from tests.sweep import toy
from tests.sweep.test_scheduler import DEADLINE_S, ROOT, alive, until

WRAPPER = [sys.executable, "-P", "-m", "runner.sweep.job_wrapper"]
Wrapped = list[subprocess.Popen[bytes]]
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
)


def attempt(where: Path, program: str, **others: object) -> JobAttempt:
    known = {"index": 0, "token": "t1", "command": (sys.executable, "-I", "-S", "-c", program)}
    paths = {
        "log": str(where / "log"),
        "note": str(where / "note.json"),
        "place": str(where),
        "run": str(where / "000"),
    }
    return JobAttempt(**{**known, "again": (), **paths, "grace_s": 300.0, **others})  # type: ignore[arg-type]


@pytest.fixture
def wrapped() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def wrap(what: JobAttempt, started: Wrapped) -> subprocess.Popen[bytes]:
    file = Path(what.place) / "attempt.json"
    file.write_text(json.dumps(asdict(what)))
    with file.open() as given:
        started.append(subprocess.Popen(WRAPPER, cwd=ROOT, stdin=given, env={**os.environ, "CARDS": "4,6"}))
    return started[-1]


def test_the_note_tells_where_a_job_ran_and_how_it_ended(tmp_path: Path, wrapped: Wrapped) -> None:
    told = attempt(tmp_path, "import os, sys; print(os.environ['A'], os.getcwd()); sys.exit(3)", visible="CARDS")
    process = wrap(JobAttempt(**{**asdict(told), "environment": {"A": "b"}}), wrapped)
    assert process.wait(DEADLINE_S) == 0
    note = read_status(tmp_path / "note.json", "t1")
    assert note is not None and note.exit_code == 3 and note.devices == ("4", "6") and note.process == process.pid
    assert note.ended is not None and 0 <= note.seconds < DEADLINE_S and abs(note.began - time.time()) < DEADLINE_S
    assert (tmp_path / "log").read_text() == f"b {tmp_path}\n"
    assert read_status(tmp_path / "note.json", "t2") is None  # of another attempt


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -9), (signal.SIGUSR1, -9)])
def test_a_job_that_does_not_end_is_killed(tmp_path: Path, wrapped: Wrapped, number: int, code: int) -> None:
    process = wrap(attempt(tmp_path, STUBBORN, grace_s=0.3 if number == signal.SIGTERM else 600.0), wrapped)
    until(lambda: (tmp_path / "log").exists() and "on" in (tmp_path / "log").read_text())
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 0
    note = read_status(tmp_path / "note.json", "t1")
    assert note is not None and note.exit_code == code


COUNTS = """
import signal, sys, time
came = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: came.append(number))
print("on", flush=True)
while not came:
    time.sleep(0.01)
time.sleep(0.5)
sys.exit(len(came))
"""


def test_a_job_is_told_once(tmp_path: Path, wrapped: Wrapped) -> None:
    process = wrap(attempt(tmp_path, COUNTS), wrapped)
    until(lambda: (tmp_path / "log").exists() and "on" in (tmp_path / "log").read_text())
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # a second one would end a run unsaved
    assert process.wait(DEADLINE_S) == 0
    note = read_status(tmp_path / "note.json", "t1")
    assert note is not None and note.exit_code == 1


def test_the_end_of_its_parent_is_a_sigterm(tmp_path: Path) -> None:
    file = tmp_path / "attempt.json"
    file.write_text(json.dumps(asdict(attempt(tmp_path, "import time; print('on', flush=True); time.sleep(600)"))))
    between = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([*sys.argv[2:], str(os.getpid())], stdin=open(sys.argv[1]))\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", between, str(file), *WRAPPER], cwd=ROOT)
    until(lambda: (note := read_status(tmp_path / "note.json", "t1")) is not None and alive(note.process))
    parent.kill()
    parent.wait()
    until(lambda: (note := read_status(tmp_path / "note.json", "t1")) is not None and note.exit_code == -15)


def test_a_job_that_cannot_be_started_is_told_of(tmp_path: Path, wrapped: Wrapped) -> None:
    file = tmp_path / "attempt.json"
    file.write_text(json.dumps(asdict(attempt(tmp_path, "", place=str(tmp_path / "none")))))
    done = subprocess.run(WRAPPER, cwd=ROOT, input=file.read_text(), capture_output=True, text=True)
    assert done.returncode == 7 and "cannot start a job" in done.stderr and "none" in done.stderr


def test_a_silent_note_is_known_as_such(tmp_path: Path) -> None:
    JobStatus("t1", "node", 1, time.time()).write(tmp_path / "note.json")
    executor = RayExecutor(SweepConfig(on="ray", address="head:6379"))
    seen = RemoteJob(executor, 0, {"token": "t1", "note": str(tmp_path / "note.json")})
    seen.read_status()
    assert seen.is_running and not seen.has_ended and seen.devices == ("node",)
    os.utime(tmp_path / "note.json", (0.0, time.time() - SILENT_S - 1))
    assert not seen.is_running


def test_only_what_is_listed_leaves_this_machine() -> None:
    here = {"HF_TOKEN": "a", "WANDB_MODE": "b", "PATH": "c", "AWS_SECRET_ACCESS_KEY": "d", "RUNNER_CACHE": "e"}
    assert forwarded_env(here) == {"HF_TOKEN": "a", "WANDB_MODE": "b", "RUNNER_CACHE": "e"}


def test_of_a_ray_job_its_threads_go_where_its_user_has_set_them() -> None:
    """Ray sets one thread in what `ray job submit` starts, which is not the number of a rank's."""
    of_ray = {"OMP_NUM_THREADS": "1", RAY_JOB: "{}"}
    by_user = {"OMP_NUM_THREADS": "4", RAY_JOB: json.dumps({"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "4"}}})}
    assert forwarded_env(of_ray) == {} and forwarded_env(by_user) == {"OMP_NUM_THREADS": "4"}


def test_a_status_tells_what_the_notes_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = toy.start(tmp_path, ["good"] * 5)
    record = toy.SweepState.read(folder)
    for index in range(4):
        path = folder.note(index)
        record.update(index, state="waiting", identity={"token": f"t{index}", "note": str(path)})
        began = JobStatus(f"t{index}", "node7", 1, time.time() - 60, ("3",))
        if index < 3:
            began.write_end(path, -9) if index == 0 else began.write(path)
    os.utime(folder.note(2), (0.0, time.time() - 864_030))
    folder.run(4).status.unlink()
    here = {"on": "local", "token": "t4", "note": str(folder.note(4))}
    record.update(4, state="waiting", identity=here)  # its sweep died as it started it
    capsys.readouterr()
    before = folder.state.read_bytes()
    assert print_status(str(folder.root)) == 0 and folder.state.read_bytes() == before
    said = capsys.readouterr().out
    assert "1 waiting, 2 running, 1 killed, 1 interrupted; not running" in said
    assert "runs     job 1  on node7, its sweep stopped" in said
    assert "runs     job 2  on node7, no heartbeat for 10d 00:00" in said
    assert "waiting  job 3  was submitted and has not started" in said
