"""One attempt at a job: in this process, or in one process per device that this one starts and watches.

               ┌─ one device ───────────▶ Session
status_of ─────┤
               └─ several ──▶ Team ──┬──▶ rank 0: Session, Records
                                     └──▶ rank 1 …: Session, NoRecords
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.errors import Interrupted
from runner.folder import RunFolder
from runner.launch import torchrun
from runner.launch.machines import gathered, joined
from runner.launch.records import status_of
from runner.launch.session import Session, called
from runner.launch.stage import is_stage
from runner.launch.team import Team
from runner.spec.job import JobSpec


def attempt(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> int:
    """Make attempt `number` at a job in a folder that the caller has locked; returns 0.

    typed: the job as it was typed, which must be the same on all machines. Raises RunnerError.
    """
    try:
        with status_of(folder, number):
            _run(spec, folder, number, typed)
    except Interrupted as error:
        if is_stage():
            raise
        raise Interrupted(error.exit_code - 128, f"{error}\ngo on    run resume {called(folder)}") from error
    return 0


def is_other_machine(spec: JobSpec) -> bool:
    """Whether machine 0 of the job is another one, which makes the run's folder."""
    return bool(spec.launch.node) and not torchrun.is_rank()


def join(spec: JobSpec, typed: Mapping[str, Any]) -> int:
    """Take part in the job of machine 0, with this machine's devices; returns 0. Raises RunnerError."""
    spec.device.preflight()
    with joined(spec, typed) as (machines, folder, number):
        Team(spec, folder, number, machines).run()
    return 0


def _run(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> None:
    if torchrun.is_rank():
        torchrun.lead(spec, folder, number)
    elif spec.launch.world == 1:
        Session(spec, folder, number).run()
    elif spec.launch.nodes == 1:
        Team(spec, folder, number).run()
    else:
        with gathered(spec, folder, number, typed) as machines:
            Team(spec, folder, number, machines).run()
