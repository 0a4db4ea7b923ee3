"""What Slurm says and is told: squeue, scancel, scontrol, and its own words where it refuses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.errors import EnvironmentProblem

# What a job does not come back from. PREEMPTED is such a state only where preempted jobs are not requeued.
OVER = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
# Why a job waits that will start by itself; all other reasons are worth a line.
USUAL = frozenset({
    "None", "Priority", "Resources", "JobArrayTaskLimit", "Dependency", "BeginTime", "Prolog", "Cleaning",
})  # fmt: skip
GONE = ("Invalid job id specified", "already completing or completed")  # what scancel says of a job that has ended
FORMAT = "%F|%K|%T|%k|%r"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One job of an array, as squeue shows it. `comment`: the token of its batch; `reason`: why it waits or failed."""

    state: str
    comment: str
    reason: str

    @property
    def is_over(self) -> bool:
        """Whether it neither runs nor waits, and will do neither again."""
        return self.state in OVER


Queue = Mapping[tuple[str, int], Entry]  # (the array's number, the index in it) → its entry


def queue(name: str) -> Queue:
    """All jobs of this name that Slurm still knows, those that ended in the last minutes included.

    Raises EnvironmentProblem where Slurm does not answer.
    """
    text = told("squeue", "--noheader", "--array", "--states=all", f"--name={name}", f"--format={FORMAT}")
    found = {}
    for line in text.splitlines():
        array, index, state, comment, reason = line.strip().split("|", 4)
        if index.isdecimal():
            found[array, int(index)] = Entry(state, comment, reason)
    return found


def save_and_end(jobs: Sequence[str], number: int) -> None:
    """Withdraw those of the jobs that wait, and send the others this signal. Raises EnvironmentProblem."""
    scancel("--state=PENDING", *jobs)
    scancel("--batch", f"--signal={int(number)}", *jobs)


def cancel(jobs: Sequence[str]) -> None:
    """End the jobs at once. Raises EnvironmentProblem."""
    scancel("--full", "--signal=KILL", *jobs)
    scancel(*jobs)


def scancel(*words: str) -> None:
    """A job that has ended by now is what was wanted. Raises EnvironmentProblem where Slurm refuses anything else."""
    try:
        told("scancel", *words)
    except EnvironmentProblem as error:
        if not all(any(gone in said for gone in GONE) for said in str(error).split("; ")):
            raise


def signals_all() -> bool:
    """Whether Slurm signals all processes of a job here, not only the one that it has started."""
    lines = [line.partition("=") for line in told("scontrol", "show", "config").splitlines()]
    return {name.strip(): value.strip() for name, _, value in lines}.get("ProctrackType") == "proctrack/linuxproc"


def told(*command: str, stdin: str = "") -> str:
    """What a command of Slurm answers. Raises EnvironmentProblem with its own words where it refuses."""
    if shutil.which(command[0]) is None:
        text = f"sweep.on=slurm: {command[0]} is not here; start the sweep where jobs are submitted from (a login node)"
        raise EnvironmentProblem(text)
    options = {"capture_output": True, "text": True, "check": False, "timeout": TIMEOUT_S}
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(command, input=stdin, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(f"{command[0]} does not answer within {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise EnvironmentProblem(words(command[0], done.stderr) or f"{command[0]}: exit code {done.returncode}")
    return done.stdout


def words(command: str, said: str) -> str:
    """What Slurm complains of, in its own words, in one line."""
    lines = [line.strip().removeprefix(f"{command}: ").removeprefix("error: ") for line in said.splitlines()]
    return f"{command}: " + "; ".join(dict.fromkeys(filter(None, lines))) if any(lines) else ""
