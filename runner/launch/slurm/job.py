"""The script of a submitted job: begins the run or resumes it, on all machines.

sbatch ─▶ python -m runner.launch.slurm.job FOLDER WORDS… ─▶ srun ─▶ run resume FOLDER WORDS…, once on each machine

SIGUSR2   Slurm's time limit is near: the run saves and ends with 75, and this job goes back into the queue
SIGUSR1   the same, but it stays out of the queue
SIGTERM   Slurm ends the job, and tells the tasks by itself; it requeues one that was preempted by itself, too
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from runner.core.errors import EnvironmentProblem
from runner.core.subprocess import ChildProcess
from runner.launch.slurm.commands import run_slurm, steps_of
from runner.launch.slurm.srun_task import REQUEUE_CODE, srun_command
from runner.run_dir.folder import RunFolder
from runner.tracker.text import print_text

WARNED, LIMIT, ENDED = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM


def main(root: str, words: Sequence[str]) -> int:
    """The exit code of the run, which Slurm then has, too; 0 of one that goes back into the queue."""
    received: list[int] = []
    forwarded: list[int] = []  # the first warning: what ends the job, Slurm sends the tasks itself

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != ENDED and not forwarded:
            forwarded.append(number)

    for number in (WARNED, LIMIT, ENDED):
        signal.signal(number, note)
    run = RunFolder(Path(root))
    before = steps_of(run)
    command = [sys.executable, "-P", "-m", "runner", "resume", root, *words]
    step = ChildProcess(srun_command(command, int(os.environ["SLURM_JOB_NUM_NODES"])), own_session=False, stdin=None)
    code = step.wait_and_forward(forwarded)
    if code == REQUEUE_CODE and LIMIT in received:
        return requeue(run, before)
    return code if code >= 0 else 128 - code


def requeue(run: RunFolder, before: int) -> int:
    """Requeue this job if the run has made more steps than `before`; returns the exit code."""
    if steps_of(run) <= before:
        print("no step was made within Slurm's time limit: not requeued; raise launch.time", flush=True)
        return REQUEUE_CODE
    try:
        run_slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    except EnvironmentProblem as error:
        print_text(f"not requeued: {error}", flush=True)
        return REQUEUE_CODE
    print("requeued: Slurm starts the job again, and the run continues from its checkpoint", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
