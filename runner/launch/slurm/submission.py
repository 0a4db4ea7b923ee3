"""Submits a job to Slurm from a login node, and follows it if requested.

spec ─▶ sbatch --test-only ─▶ run folder: spec.yaml, status "waiting" ─▶ slurm/job.sh ─▶ sbatch ─▶ slurm/job.json
                                                 run resume FOLDER, on all machines ◀─── job ◀───┘
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.core.device_kinds import ResourceRequest
from runner.core.errors import EnvironmentProblem, Interrupted
from runner.launch.config import SlurmConfig
from runner.launch.exit_cause import LOST, JobFailed
from runner.launch.slurm.commands import FINISHED_STATES, USUAL_REASONS, gres_of, run_slurm, state_of
from runner.run_dir.folder import RunFolder, display_path, read_mapping, run_argument, write_atomic, write_json
from runner.spec.job import JobSpec
from runner.tracker.text import count_noun, print_text

WAITING = "waiting"  # the state of a submitted run that has not started
SUBMITTED = re.compile(r"Submitted batch job (\d+)")
POLL_S = 3.0  # between two calls of squeue
SILENT_S = 600.0  # without a response from Slurm, after which polling ends
LATE_S = 10.0  # for a job's files to appear on a shared disk


def check_submission(spec: JobSpec) -> None:
    """Check that Slurm accepts the job. Raises EnvironmentProblem with its reasons, SpecError."""
    try:
        run_slurm("sbatch", "--test-only", stdin=batch_script(spec, Path("slurm"), "true"))
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"Slurm rejects a job with {_request_text(spec)}: {error}") from error


def mark_waiting(folder: RunFolder) -> None:
    """Write the status of a new run that has not started. Raises StorageError."""
    record = {"state": WAITING, "attempt": 0, "pid": None, "exit_code": None, "error": None}
    write_json(folder.status, record)


def refuse_queued(folder: RunFolder) -> None:
    """Raise EnvironmentProblem if Slurm still has a job of this run."""
    job = read_mapping(folder.slurm / "job.json").get("job")
    found = state_of(job) if job else None
    if found is not None and found[0] not in FINISHED_STATES:
        text = f"this run is already in Slurm: job {job}, {found[0]}; wait for it, or type: scancel {job}"
        raise EnvironmentProblem(f"{display_path(folder.root)}: {text}")


def submit(spec: JobSpec, folder: RunFolder, words: Sequence[str]) -> int:
    """Submit the run in `folder` to Slurm, to start or resume with `words`; returns 0, or its exit code.

    Raises EnvironmentProblem if Slurm rejects it, and the error of a job that is followed.
    """
    folder.slurm.mkdir(exist_ok=True)
    path = folder.slurm / "job.sh"
    command = [sys.executable, "-P", "-m", "runner.launch.slurm.srun_task", str(folder.root), *words]
    write_atomic(path, batch_script(spec, folder.slurm, "exec " + shlex.join(command)))
    before = _status_bytes(folder)
    output = run_slurm("sbatch", str(path))
    number = SUBMITTED.search(output)
    if number is None:
        raise EnvironmentProblem(
            f"sbatch: {output.strip() or 'no output'}; a line 'Submitted batch job …' was expected"
        )
    job, log = number[1], folder.slurm / f"{number[1]}.log"
    write_json(folder.slurm / "job.json", {"job": job, "log": str(log)})
    print_text(f"slurm    job {job} submitted: {_request_text(spec)}; to cancel it: scancel {job}")
    print_text(f"folder   {display_path(folder.root)}")
    print_text(f"log      {display_path(log)}")
    print_text(f"watch    run status {run_argument(folder)}", flush=True)
    config = _launch(spec)
    return follow(folder, job, log, before) if config.follow else 0


def batch_script(spec: JobSpec, where: Path, command: str) -> str:
    """The sbatch script: the resources of the job, its log in the folder `where`, its command."""
    lines = [f"#SBATCH --{name}" + ("" if value is True else f"={_quote(value)}") for name, value in _options(spec)]
    return "\n".join(["#!/bin/bash", *lines, f"#SBATCH --output={_quote(where / '%j.log')}", command, ""])


def _quote(value: object) -> str:
    return shlex.quote(str(value))


def _launch(spec: JobSpec) -> SlurmConfig:
    assert isinstance(spec.launch, SlurmConfig)
    return spec.launch


def _options(spec: JobSpec) -> list[tuple[str, str | int | bool]]:
    config, need = _launch(spec), ResourceRequest.of_spec(spec)
    is_on_cores = need.kind == "core"
    asked: Mapping[str, str | int | bool | None] = {
        "job-name": spec.name,
        "nodes": config.nodes,
        "ntasks": config.nodes,
        "ntasks-per-node": 1,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "time": config.time,
        "gres": None if is_on_cores else f"{gres_of(config.gres, need)}:{need.count}",
        "cpus-per-task": config.cpus or (need.count if is_on_cores else None),  # with cards: the cluster's default
        "requeue": True,
        "open-mode": "append",  # a requeued job appends to the same log
        "signal": f"B:USR2@{config.preempt_notice_s}",
    }
    return [(name, value) for name, value in {**asked, **config.sbatch}.items() if value is not None]


def _request_text(spec: JobSpec) -> str:
    """2 machines, each 8 NPUs"""
    config, need = _launch(spec), ResourceRequest.of_spec(spec)
    processes = spec.launch.devices + spec.launch.samplers
    each = f"{processes} process{'es' if processes > 1 else ''}" if need.kind == "core" else str(need)
    machines = f"{count_noun(config.nodes, 'machine')}, " + ("each " if config.nodes > 1 else "")
    return machines + each + (f", partition {config.partition}" if config.partition else "")


def follow(folder: RunFolder, job: str, log: Path, before: bytes) -> int:
    """Print a job's log until it has ended; returns 0 if it succeeds.

    before: the status when it was submitted; in a resumed run, that of the last attempt

    Raises JobFailed with the job's error and exit code; Interrupted at Ctrl-C, and EnvironmentProblem if Slurm does not
    respond for SILENT_S, neither of which ends the job.
    """
    at, waits_for, last = 0, "", ("", "")
    try:
        for found in _poll_states(job):
            at = _print_more(log, at)
            if found is None or found[0] in FINISHED_STATES:
                break
            last = found
            if found[0] == "PENDING" and found[1] not in (waits_for, "None"):
                waits_for = found[1]
                hint = "" if waits_for in USUAL_REASONS else "; it may never start"
                print_text(f"slurm    job {job} waits: {waits_for}{hint}", flush=True)
    except KeyboardInterrupt:
        raise Interrupted(2, _unfollowed_text(job)) from None
    return _exit_as_job(folder, job, found or last, before)


def _poll_states(job: str) -> Iterator[tuple[str, str] | None]:
    """A job's state and reason at each poll; if Slurm does not respond, the last ones, with a message.

    Raises EnvironmentProblem if it does not respond for SILENT_S.
    """
    found: tuple[str, str] | None = ("", "")
    last_answer, is_silent = time.monotonic(), False
    while True:
        try:
            found, last_answer, is_silent = state_of(job), time.monotonic(), False
        except EnvironmentProblem as error:
            if time.monotonic() - last_answer > SILENT_S:
                raise EnvironmentProblem(f"{error}, for {SILENT_S:g} s; {_unfollowed_text(job)}") from error
            if not is_silent:
                print_text(f"slurm    {error}; retrying", flush=True)
            is_silent = True
        yield found
        time.sleep(POLL_S)


def _unfollowed_text(job: str) -> str:
    return f"stopped following job {job}, which continues; to end it: scancel {job}"


def _print_more(log: Path, at: int) -> int:
    """Print the log from a position; returns the new position."""
    if log.is_file():
        with log.open("rb") as file:
            file.seek(at)
            content = file.read()
        sys.stdout.write(content.decode("utf-8", "replace"))
        sys.stdout.flush()
        at += len(content)
    return at


def _status_bytes(folder: RunFolder) -> bytes:
    return folder.status.read_bytes() if folder.status.is_file() else b""


def _exit_as_job(folder: RunFolder, job: str, found: tuple[str, str], before: bytes) -> int:
    deadline = time.monotonic() + LATE_S
    while True:
        is_new = _status_bytes(folder) != before
        status: Mapping[str, Any] = read_mapping(folder.status) if is_new else {"state": WAITING}
        if status["state"] == "done":
            return 0
        if status["state"] not in (WAITING, "running") or time.monotonic() > deadline or found[0] != "COMPLETED":
            break
        time.sleep(POLL_S / 10)
    why = status.get("error") or (f"its status is {status['state']}" if is_new else "the run did not start")
    text = f"Slurm job {job} ended ({found[0] or 'Slurm has no record of it'}): {why}"
    raise JobFailed(text, status.get("exit_code") or LOST)
