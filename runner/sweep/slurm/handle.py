"""One job of a sweep in Slurm: how far it is, by its note and by what squeue says, and how it ended."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Protocol

from runner.sweep.note import Note, read
from runner.sweep.outcome import Told
from runner.sweep.site import Identity
from runner.sweep.slurm.queue import Entry

LATE_S = 10.0  # for a note to come through a shared folder after its job has ended
SAID = {
    "OUT_OF_MEMORY": Told("out of memory, says Slurm", "killed"),
    "TIMEOUT": Told("the time limit of Slurm", "timeout"),
    "NODE_FAIL": Told("its node failed, says Slurm", "killed"),
    "PREEMPTED": Told("preempted, says Slurm"),
    "CANCELLED": Told("cancelled in Slurm"),
}


class Asked(Protocol):
    """What a job asks of its site."""

    @property
    def answers(self) -> int: ...  # that squeue has given so far

    def is_submitted(self, batch: str) -> bool: ...

    def turn(self) -> None: ...

    def entry(self, batch: str, index: int) -> Entry | None: ...

    def ended(self, job: SlurmJob) -> None: ...


class SlurmJob:
    """A job that waits in a batch, or in Slurm, or runs, or has ended."""

    def __init__(self, site: Asked, batch: str, index: int, token: str, note: Path) -> None:
        self.batch, self.index = batch, index
        self._site, self._token, self._path = site, token, note
        self._note = read(note, token)
        self._seen = site.answers
        self._signal: int | None = None
        self._was_killed = False  # then it notes nothing more
        self._code: int | None = None
        self._over_since: float | None = None
        self.told: Told | None = None

    @property
    def identity(self) -> Identity:
        return {"batch": self.batch}

    @property
    def seconds(self) -> float | None:
        if self._note is None or self._is_waiting:
            return None
        return self._note.seconds

    @property
    def devices(self) -> tuple[str, ...]:
        return () if self._note is None else self._note.devices

    @property
    def is_alive(self) -> bool:
        """Whether it waits or runs, as far as is known."""
        if self._code is not None or not self._site.is_submitted(self.batch):
            return self._code is None
        entry = self._entry
        return entry is not None and not entry.is_over

    @property
    def is_known(self) -> bool:
        """Whether it is alive, or has said how it ended."""
        return self.is_alive or (self._note is not None and self._note.ended is not None)

    def poll(self) -> int | None:
        if self._code is None:
            self._site.turn()
        if self._code is None and self._site.answers != self._seen:
            self._seen = self._site.answers
            self._look()
        return self._code

    def signal(self, number: int) -> None:
        if self._code is not None:
            return
        if not self._site.is_submitted(self.batch):
            self.withdraw(number)
        else:
            self._signal = number
            self._was_killed = self._was_killed or number == signal.SIGKILL

    def withdraw(self, number: int) -> None:
        """End a job that Slurm has not been given."""
        self._end(-number)

    def take_signal(self) -> int | None:
        """What is to be passed on to it, once."""
        number, self._signal = self._signal, None
        return number

    @property
    def _entry(self) -> Entry | None:
        return self._site.entry(self.batch, self.index)

    @property
    def _is_waiting(self) -> bool:
        entry = self._entry
        return entry is not None and entry.state == "PENDING"  # also one that is to be started again

    def _look(self) -> None:
        """Take in what Slurm has just said, and what the job has noted."""
        self._note, entry = read(self._path, self._token), self._entry
        if entry is not None and not entry.is_over:
            self._over_since = None
            return
        self._over_since = self._over_since or time.monotonic()
        if self._note is not None and self._note.ended is not None:
            self.told = self._note.told or (SAID.get(entry.state) if entry else None)
            self._end(self._note.exit_code or 0)
        elif entry is not None and entry.state in SAID and self._note is None:
            self.told = SAID[entry.state]  # withdrawn before it began
            self._end(-signal.SIGTERM)
        elif self._was_killed or time.monotonic() - self._over_since > LATE_S:
            self.told = unheard(entry, self._note)
            self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        self._code = code
        self._site.ended(self)


def unheard(entry: Entry | None, note: Note | None) -> Told:
    """What became of a job that ended without noting it."""
    if entry is not None and entry.state in SAID:
        return SAID[entry.state]
    said = "Slurm does not know it any more" if entry is None else f"Slurm says {entry.state}, {entry.reason}"
    if note is None:
        return Told(f"did not begin on its node ({said}); what it printed is in its log", "failed")
    return Told(f"its process on {note.host} was killed ({said})", "killed")
