"""One job, in as many attempts as it may have: in this process, or in processes that this one starts and watches.

            ┌─ one device ───────────▶ Session
attempt ────┤
            └─ several ──▶ Team ──┬──▶ rank 0: Session, Records
                                  ├──▶ rank 1 …: Session, NoRecords
                                  └──▶ sampler 0 …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from runner.errors import Interrupted, RunnerError
from runner.folder import RunFolder
from runner.launch import torchrun
from runner.launch.janitor import Janitor
from runner.launch.machines import Machines, gathered, joined
from runner.launch.records import keep_evidence, status_of
from runner.launch.session import Session, called
from runner.launch.slurm import task
from runner.launch.stage import is_stage
from runner.launch.starter import Local
from runner.launch.team import Team
from runner.launch.verdict import is_final
from runner.spec.job import JobSpec
from runner.temporary import temporary_of
from runner.tracker.console import Console


def attempt(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> int:
    """Make attempt `number` at a job in a folder that the caller has locked, and others as `attempts`; returns 0.

    typed: the job as it was typed, which must be the same on all machines. Raises RunnerError.
    """

    def run(now: int) -> None:
        with task.obeyed(spec):
            _run(spec, folder, now, typed)

    attempts(spec, folder, number, run)
    return 0


def attempts(spec: JobSpec, folder: RunFolder, number: int, run: Callable[[int], None]) -> None:
    """Make attempt `number` with `run`, and where it ends of what need not come again, the next one, which goes on from
    the newest checkpoint: launch.attempts in all. Raises what the last one ends with."""
    last = number + spec.launch.attempts - 1
    while True:
        try:
            with status_of(folder, number):
                run(number)
            return
        except Interrupted as error:
            if is_stage():
                raise
            raise Interrupted(error.exit_code - 128, f"{error}\ngo on    run resume {called(folder)}") from error
        except RunnerError as error:
            if number >= last or is_final(error):
                raise
            cause, *_ = str(error).splitlines()
        number += 1
        keep_evidence(folder, number, ())
        left = f"attempt {number} goes on from the newest checkpoint"
        more = f"{last - number} more after it" if last > number else "the last one"
        Console(folder.log).message(f"attempt {number - 1} ended: {cause}; {left} ({more})", "warning")


def is_other_machine(spec: JobSpec) -> bool:
    """Whether machine 0 of the job is another one, which makes the run's folder."""
    return bool(spec.launch.machine) and not torchrun.is_rank()


def join(spec: JobSpec, typed: Mapping[str, Any]) -> int:
    """Take part in the job of machine 0, with this machine's devices; returns 0. Raises RunnerError."""
    spec.device.preflight()
    with task.obeyed(spec), joined(spec, typed) as (machines, folder, number):
        _together(spec, folder, number, machines)
    return 0


def _run(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> None:
    if torchrun.is_rank():
        torchrun.lead(spec, folder, number)
    elif spec.launch.machines > 1:
        with gathered(spec, folder, number, typed) as machines:
            _together(spec, folder, number, machines)
    elif spec.launch.alone and spec.launch.attempts == 1:
        _here(spec, folder, number)
    else:
        _together(spec, folder, number)


def _here(spec: JobSpec, folder: RunFolder, number: int) -> None:
    """Run it in this process; what an engine leaves where that is killed is removed after it."""
    if not spec.sampler.engine:
        Session(spec, folder, number).run()
        return
    with closing(Janitor()) as janitor:
        janitor.remove(folder.engine, temporary_of(folder.engine))
        Session(spec, folder, number).run()


def _together(spec: JobSpec, folder: RunFolder, number: int, machines: Machines | None = None) -> None:
    """Start this machine's processes, and watch them to their end."""
    with closing(Local(spec, machines)) as starter:
        Team(spec, folder, number, starter, machines).run()
