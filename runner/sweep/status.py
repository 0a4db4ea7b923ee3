"""How far a sweep is, told beside a running one or after one that died: then from what its jobs have noted since."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.errors import EnvironmentProblem
from runner.folder import shown
from runner.sweep import note as notes
from runner.sweep import plan as plans
from runner.sweep import words
from runner.sweep.outcome import Told, judge
from runner.sweep.plan import SweepFolder
from runner.sweep.process import is_alive
from runner.sweep.record import FINISHED, Record, is_held
from runner.sweep.results import gather
from runner.sweep.slurm import standing
from runner.tracker.text import duration


def status(where: str) -> int:
    """Print how far a sweep is; returns 0. Changes nothing."""
    folder, plan = plans.find(where)
    record, running = Record.read(folder), is_held(folder)
    lines = [] if running else list(catch_up(folder, record))
    counts = ", ".join(f"{count} {state}" for state, count in record.count().items())
    print(f"{shown(folder.root)}: {counts}; {'running' if running else 'not running'}")
    print("\n".join([*words.table(gather(folder, plan, record)), *lines]))
    if not running and any(job.state not in FINISHED for job in record):
        print(f"go on    run sweep resume {words.name_of(folder)}")
    return 0


def catch_up(folder: SweepFolder, record: Record) -> Iterator[str]:
    """Take into `record`, in memory only, what became of jobs that a sweep which is gone has left; a line for each that
    goes on without it."""
    queued: Mapping[int, str] = {}
    try:
        queued = standing.waiting(folder.root, record)
    except EnvironmentProblem as error:
        yield f"note     {error}; what is said here, the jobs have noted"
    for index, job in enumerate(record):
        if job.identity is None:
            continue
        if index in queued:
            record.assume(index, state="waiting")
            yield f"waiting  job {index}  in Slurm: {queued[index]}"
            continue
        if job.identity.get("on") == "local":  # without a number, the sweep died before it could write that down
            if "pid" not in job.identity or not is_alive((job.identity["pid"], job.identity["started"])):
                _settle(folder, record, index, -signal.SIGTERM, Told("the sweep ended"))
            continue
        path = Path(job.identity["note"])
        note = notes.read(path, job.identity["token"])
        if note is None:
            yield f"waiting  job {index}  was handed over, and has not begun"
        elif note.exit_code is None:
            record.assume(index, state="running", devices=note.where, seconds=job.seconds + note.seconds)
            yield f"runs     job {index}  on {note.host}, {_sign_of_life(path)}"
        else:
            record.assume(index, devices=note.where, seconds=job.seconds + note.seconds, exit_code=note.exit_code)
            _settle(folder, record, index, note.exit_code, note.told)


def _settle(folder: SweepFolder, record: Record, index: int, code: int, told: Told | None) -> None:
    ended = judge(code, told, folder.run(index), folder.output(index))
    record.assume(index, state=ended.state, error=ended.error)


def _sign_of_life(path: Path) -> str:
    silent = notes.silent_s(path)
    if silent <= notes.SILENT_S:
        return "without its sweep"
    return f"silent for {duration(silent)}: its machine may be gone, which a resume finds out"
