"""Every error a user can meet, and the exit code it ends with.

    RunnerError                     1   a bug in this project, unless a subclass says otherwise
    ├── SpecError                   2   the job spec is wrong (carries every problem found)
    ├── EnvironmentProblem          2   a device, a package or a permission is missing
    │   ├── NotReady                2   this machine lacks what the job needs, all of it in one error
    │   └── UnsupportedModelError   2   a model cannot do what the job needs
    ├── DataError                   3   the data cannot be used as it is
    ├── CheckpointError             4   checkpoints exist and none is valid, or one does not fit
    ├── TrainingDiverged            5   a numeric guard stopped the run
    ├── ParityError                 5   `run parity`: another device does not compute the same; a bound of `run bench`
    ├── DeadlineExceeded            6   something hung
    ├── StorageError                7   disk full, read-only, I/O error
    ├── SecurityError               8   a config, model or data tried to run code or to leak a secret
    ├── SweepFailed                 9   some jobs of a sweep failed; the others have their results
    ├── OutOfMemory                75   worth a retry with smaller micro-batches
    ├── RankLost                   75   a process or a machine of the job was lost; worth a retry
    ├── SamplerError               75   a sampler was lost, or does not answer as these weights would
    └── Interrupted           130/143   SIGINT or SIGTERM; a checkpoint was written, if a step was made

A message says what is wrong, where it was set, and what to type next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RunnerError(Exception):
    """Base of all errors that are worded for the user; `exit_code` is what the process ends with."""

    exit_code = 1

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a job spec: the key, what is wrong with it, and who set it."""

    key: str
    message: str
    origin: str = ""


class SpecError(RunnerError):
    """The job spec is wrong; `problems` lists everything found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(render_problems(self.problems))


class EnvironmentProblem(RunnerError):
    """This machine lacks a device, a package or a permission that the spec needs."""

    exit_code = 2


class NotReady(EnvironmentProblem):
    """This machine lacks what a job needs; the message lists everything found before torch is imported."""

    def __init__(self, faults: Sequence[RunnerError]) -> None:
        super().__init__("\n".join(map(str, faults)))


class UnsupportedModelError(EnvironmentProblem):
    """A model does not support the request; the caller says which option to change."""


class DataError(RunnerError):
    """The data cannot be used as it is; the message names file, line and what was expected."""

    exit_code = 3


class CheckpointError(RunnerError):
    """Checkpoints exist and none is valid, or one does not fit this job."""

    exit_code = 4


class TrainingDiverged(RunnerError):
    """A loss, gradient or weight is not finite; nothing was updated with it."""

    exit_code = 5


class ParityError(RunnerError):
    """A device does not compute what another one did, or less than a bound requires."""

    exit_code = 5


class DeadlineExceeded(RunnerError):
    """Something did not answer within its deadline."""

    exit_code = 6


class StorageError(RunnerError):
    """The disk is full, read-only or failing."""

    exit_code = 7


class SecurityError(RunnerError):
    """A config, model or data file tried to run code or to write a secret to disk."""

    exit_code = 8


class SweepFailed(RunnerError):
    """Some jobs of a sweep failed; the others have their results."""

    exit_code = 9


class OutOfMemory(RunnerError):
    """The device's memory is exhausted; a retry with smaller micro-batches may work."""

    exit_code = 75


class RankLost(RunnerError):
    """A process or a machine of the job is gone; a resume may work."""

    exit_code = 75


class SamplerError(RunnerError):
    """What samples is gone for good, or its answers are not those of the weights that it was given."""

    exit_code = 75


class Interrupted(RunnerError):
    """SIGINT or SIGTERM arrived; a step under way was finished and a checkpoint written."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message, 128 + signal_number)


def render_problems(problems: Sequence[Problem]) -> str:
    """The table of problems as the user sees it: key and message left, who set it right."""
    count = len(problems)
    head = f"the job spec has {count} problem{'s' if count != 1 else ''}"
    bodies = [(f"{p.key}: {p.message}" if p.key else p.message).split("\n") for p in problems]
    width = min(max((len(first) for first, *_ in bodies), default=0), 100)
    lines = [head]
    for (first, *more), p in zip(bodies, problems, strict=True):
        lines.append(f"  {first.ljust(width)}  [{p.origin}]" if p.origin else f"  {first}")
        lines += [f"    {line}" for line in more]
    return "\n".join(lines)
