"""What sites share whose jobs run elsewhere: how their notes are followed."""

from __future__ import annotations

import time
from pathlib import Path

from runner.sweep import note as notes
from runner.sweep.note import Note
from runner.sweep.outcome import Told
from runner.sweep.site import Identity

LOOK_S = 0.2  # between two looks at a note


class Noted:
    """An attempt of a job, seen through its note."""

    def __init__(self, identity: Identity) -> None:
        self._path, self._token = Path(identity["note"]), str(identity["token"])
        self._note: Note | None = None
        self._looked = 0.0

    def look(self) -> Note | None:
        """Its note, at most LOOK_S old; None before it has begun."""
        now = time.monotonic()
        if now - self._looked > LOOK_S and (self._note is None or self._note.ended is None):
            self._looked = now
            self._note = notes.read(self._path, self._token) or self._note
        return self._note

    @property
    def seconds(self) -> float | None:
        """For how long it has run, or ran; None before it has begun."""
        note = self.look()
        return None if note is None else note.seconds

    @property
    def devices(self) -> tuple[str, ...]:
        """Its cards, or the machine where it runs if it has none."""
        note = self.look()
        return () if note is None else note.where

    @property
    def told(self) -> Told | None:
        """What its note tells of why it ended."""
        note = self.look()
        return None if note is None else note.told

    @property
    def exit_code(self) -> int | None:
        """As its note tells it; None as long as that does not."""
        note = self.look()
        return None if note is None else note.exit_code

    @property
    def is_silent(self) -> bool:
        """Whether it has begun, has not ended, and gives no sign of life any more."""
        note = self.look()
        return note is not None and note.ended is None and notes.silent_s(self._path) > notes.SILENT_S
