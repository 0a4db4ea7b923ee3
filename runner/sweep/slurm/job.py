"""What runs inside a Slurm job, on its node: starts one job of a sweep, passes on what it is told, notes how it ended.

sbatch ─▶ exec python -m runner.sweep.slurm.job BATCH ─┬─▶ the job, or, where Slurm starts it again, its going on
                                                       └─▶ jobs/003.note.json: began, lives, ended

SIGUSR1   the sweep: save and end                     SIGTERM   Slurm ends the job: cancelled, preempted, requeued
SIGUSR2   Slurm's time limit is near: save and end, and back into the queue to go on from there
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.device.kinds import KINDS, NPU
from runner.errors import EnvironmentProblem
from runner.folder import RunFolder
from runner.slurm.cards import handed_out
from runner.slurm.commands import steps_of, told
from runner.sweep.minder import Minder, Signals, begun
from runner.sweep.note import now
from runner.sweep.order import Order
from runner.sweep.outcome import ENDED_BY_US, Told
from runner.sweep.slurm.batch import Batch

SAVE, LIMIT, ENDED = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM


def main(path: str) -> int:
    """Run the job of this array index; its exit code, which Slurm then has, too."""
    signals = Signals((SAVE, LIMIT, ENDED))
    batch = Batch.read(Path(path))
    order = batch.orders[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    shown = cards(batch)
    goes_on = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and RunFolder(Path(order.run)).spec.is_file()
    command, before = order.again if goes_on else order.command, steps_of(RunFolder(Path(order.run)))
    minder = Minder(order, command, passed_on(batch.all_signalled), signals, shown, batch.timeout_s)
    note = begun(order, devices_of(batch, shown))
    note.write(Path(order.note))
    code, told = minder.run(), minder.told
    if minder.first == LIMIT and code in ENDED_BY_US and (told := requeue(order, before)) is None:
        return 0  # Slurm starts it again; the note says that it runs until it then says more
    note.with_end(now(), code, told).write(Path(order.note))
    return code if code >= 0 else 128 - code


def passed_on(all_signalled: bool) -> Mapping[int, int]:
    """What the job gets for what this process is told; `all_signalled`: it has got Slurm's SIGTERM already."""
    return {SAVE: signal.SIGTERM, LIMIT: signal.SIGTERM, ENDED: 0 if all_signalled else signal.SIGTERM}


def requeue(order: Order, before: int) -> Told | None:
    """Put this job back into Slurm's queue, if it made more steps than it had `before`; why not, else."""
    if steps_of(RunFolder(Path(order.run))) <= before:
        return Told("no step was made within the time limit of Slurm", "timeout")
    try:
        told("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    except EnvironmentProblem as error:
        return Told(f"the time limit of Slurm; {error}", "interrupted")
    return None


def cards(batch: Batch) -> dict[str, str]:
    """The variable that shows the job its cards, where Slurm does not set it: for NPUs.

    It may be in the environment all the same, from where the sweep was typed.
    """
    kind = KINDS.get(batch.kind)
    if kind is None or kind.visible is None or (kind.visible in os.environ and kind is not NPU):
        return {}
    numbers = handed_out(os.environ["SLURM_JOB_ID"], batch.gres)
    if not numbers:
        seen = os.environ.get(kind.visible, "all of them")
        text = (
            f"Slurm does not tell which cards are this job's (gres.conf has no File= for {batch.gres}): it sees {seen}"
        )
        print(text, flush=True)
        return {}
    return {kind.visible: ",".join(map(str, numbers))}


def devices_of(batch: Batch, shown: dict[str, str]) -> tuple[str, ...]:
    """Where the job runs, for its row in the table: the node, and its cards there."""
    kind, host = KINDS.get(batch.kind), socket.gethostname()
    listed = {**os.environ, **shown}.get(kind.visible or "", "") if kind else ""
    return tuple(f"{host}:{card}" for card in listed.split(",")) if listed else (host,)


def run(arguments: Sequence[str]) -> int:
    """The program."""
    [path] = arguments
    return main(path)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
