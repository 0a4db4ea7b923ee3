"""Runs inside a Slurm job on its node: starts one job of a sweep, forwards signals, writes its status.

sbatch ─▶ exec python -m runner.sweep.slurm_executor_job slurm/<token>.json GRES all|first
              └─▶ the job's command or, after a requeue, the command that resumes it; status: jobs/003.note.json

GRES      Slurm's name of the job's cards             all       Slurm's SIGTERM reaches all processes of a job
SIGUSR1   the sweep: save and end                     SIGTERM   Slurm ends the job: cancelled, preempted, requeued
SIGUSR2   Slurm's time limit is near: save and end; the job is requeued and resumes
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from runner.core.device_kinds import KINDS
from runner.core.errors import EnvironmentProblem
from runner.launch.slurm.commands import allocated_cards, run_slurm, steps_of
from runner.run_dir.folder import RunFolder
from runner.sweep.job import STOP_CODES, JobAttempt, StopReason, from_json
from runner.sweep.job_wrapper import JobWrapper, SignalQueue, begin_status

SAVE, LIMIT, ENDED = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM


def main(path: str, gres: str, signalled: str) -> int:
    """Run the job of this array index; returns its exit code, for Slurm."""
    forwarded: dict[int, int] = dict.fromkeys((SAVE, LIMIT, ENDED), signal.SIGTERM)
    if signalled == "all":
        forwarded[ENDED] = 0
    signals = SignalQueue(forwarded)
    attempts = json.loads(Path(path).read_text(encoding="utf-8"))
    attempt = from_json(JobAttempt, attempts[os.environ["SLURM_ARRAY_TASK_ID"]])
    shown, run = visible_cards_env(attempt, gres), RunFolder(Path(attempt.run))
    before = steps_of(run)
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and run.spec.is_file():
        attempt = replace(attempt, command=attempt.again)
    wrapper = JobWrapper(attempt, forwarded, signals, shown)
    host, listed = socket.gethostname(), {**os.environ, **shown}.get(attempt.visible or "", "")
    status = begin_status(attempt, [f"{host}:{card}" for card in listed.split(",")] if listed else [host])
    code, reason = wrapper.run(), wrapper.reason
    if wrapper.first == LIMIT and code in STOP_CODES and (reason := requeue(run, before)) is None:
        return 0  # requeued: its status stays "running" until the next start
    status.write_end(Path(attempt.note), code, reason)
    return code if code >= 0 else 128 - code


def requeue(run: RunFolder, before: int) -> StopReason | None:
    """Requeue this job if it has made more steps than `before`; returns why not, None if it was requeued."""
    if steps_of(run) <= before:
        return StopReason("no step was finished within Slurm's time limit", "timeout")
    try:
        run_slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    except EnvironmentProblem as error:
        return StopReason(f"Slurm's time limit; {error}", "interrupted")
    return None


def visible_cards_env(attempt: JobAttempt, gres: str) -> dict[str, str]:
    """The variable that lists the job's cards, if Slurm does not set it: for NPUs.

    The environment may have another value, from where the sweep was started.
    """
    variable = attempt.visible
    shown = {kind.visible for kind in KINDS.values() if kind.shown_by_slurm}
    if variable is None or (variable in os.environ and variable in shown):
        return {}
    numbers = allocated_cards(os.environ["SLURM_JOB_ID"], gres)
    if not numbers:
        seen = os.environ.get(variable, "all of them")
        print(f"Slurm does not report the cards of this job (gres.conf has no File= for {gres}): it sees {seen}")
        sys.stdout.flush()
        return {}
    return {variable: ",".join(map(str, numbers))}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
