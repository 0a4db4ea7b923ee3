"""What Slurm says of the jobs of a sweep, and is told of them: squeue, scancel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.errors import EnvironmentProblem
from runner.slurm.commands import OVER, told

GONE = ("Invalid job id specified", "already completing or completed")  # what scancel says of a job that has ended
FORMAT = "%F|%K|%T|%k|%r"


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
