"""What is written down beside a job that runs elsewhere: that it began, that it lives, how it ended.

jobs/003.note.json   replaced when it begins and when it ends; touched every few seconds in between
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from runner.folder import write_json
from runner.sweep.outcome import Told

TOUCH_S = 5.0  # between two signs of life
SILENT_S = 30.0  # without one, who wrote them is gone: a shared folder may show a change some seconds late


@dataclass(frozen=True, slots=True)
class Note:
    """One attempt of a job, as the machine where it runs tells it. Times are seconds since the epoch, of its clock.

    token: of the order; process: of the minder; devices: the cards that it was given
    exit_code: negative for a signal; None while it runs
    told: why it was told to stop, where that was decided there
    """

    token: str
    host: str
    process: int
    began: float
    devices: tuple[str, ...] = ()
    ended: float | None = None
    exit_code: int | None = None
    told: Told | None = None

    def with_end(self, ended: float, exit_code: int, told: Told | None = None) -> Note:
        """It, once the job has ended."""
        return replace(self, ended=ended, exit_code=exit_code, told=told)

    @property
    def seconds(self) -> float:
        """For how long the job has run, or ran."""
        return max((now() if self.ended is None else self.ended) - self.began, 0.0)

    @property
    def where(self) -> tuple[str, ...]:
        """Its cards, or its machine if it has none."""
        return self.devices or (self.host,)

    def write(self, path: Path) -> None:
        """Put it in its place. Raises StorageError."""
        write_json(path, asdict(self))


def now() -> float:
    """Seconds since the epoch, of this machine's clock."""
    return datetime.now().timestamp()


def read(path: Path, token: str) -> Note | None:
    """The note of this attempt; None where there is none yet, which that of another attempt is, too."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # not there yet, or a shared folder that hiccups: who asks, asks again
    if not isinstance(data, Mapping) or data.get("token") != token:
        return None
    told = data.get("told")
    return Note(**{**data, "devices": tuple(data["devices"]), "told": told and Told(**told)})


def silent_s(path: Path) -> float:
    """Seconds since the last sign of life of a job that runs; infinite where there never was one."""
    try:
        return max(now() - path.stat().st_mtime, 0.0)
    except OSError:
        return float("inf")


def touch(path: Path) -> None:
    """Give a sign of life, if the folder takes it: who reads sees silence else, and no job ends for it."""
    with suppress(OSError):
        os.utime(path)
