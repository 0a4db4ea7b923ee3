"""What a site is told of a job that it is to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt of a job: all that is told to who runs it. JSON as `asdict`; all paths are absolute.

    index: the job's number; name: `<sweep>-003`; token: of this attempt alone
    again: the command where Slurm starts it once more and its run folder, `run`, has begun
    log: where its output is appended; note: where who runs it says when it began and how it ended (runner.sweep.note)
    place: its working folder; grace_s: seconds from the signal to save and end until it is killed
    visible: the variable that lists the cards it was given, if it wants any
    environment: variables that it gets on top of those of the machine where it runs
    """

    index: int
    name: str
    token: str
    command: tuple[str, ...]
    again: tuple[str, ...]
    run: str
    log: str
    note: str
    place: str
    grace_s: float
    visible: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
