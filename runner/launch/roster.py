"""Who takes part in a job: written beside it by each launcher every few seconds, and read by `run status`.

Team ─▶ members/<machine>.json: the launcher; of each process: where it runs, its step, when it was heard, how often it
        was started anew

No step waits for it, and no job ends for it: where the disk refuses the file, who reads it sees an old one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from runner.folder import RunFolder
from runner.launch.member import Process
from runner.place import Machine

BEAT_S = 2.0


@dataclass(slots=True)
class Roster:
    """What one launcher, of machine `machine`, writes of attempt `attempt`."""

    folder: RunFolder
    attempt: int
    machine: int = 0
    due: float = 0.0

    def note(self, members: Sequence[Process], replaced: Mapping[str, int], *, over: bool = False) -> None:
        """Write it, if it is time, or the attempt is `over`. replaced: how often one was started anew, by its name."""
        if time.monotonic() < self.due and not over:
            return
        self.due = time.monotonic() + BEAT_S
        here = Machine.here()
        launcher = {"host": here.host, "boot_id": here.boot_id, "pid": os.getpid()}
        said = [self._of(member, replaced.get(member.order.name, 0)) for member in members]
        content = {"attempt": self.attempt, "written": _now(), "over": over, "launcher": launcher, "members": said}
        path = self.folder.members / f"{self.machine}.json"
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            staged = path.with_name(f".{path.name}")
            staged.write_text(json.dumps(content, indent=1))
            staged.replace(path)

    def _of(self, member: Process, replaced: int) -> dict[str, Any]:
        order, ear = member.order, member.ear
        return {
            "name": order.name,
            "role": order.role,
            "index": order.index,
            **ear.where,
            "runs": member.runs(),
            "begun": ear.begun,
            "step": ear.step if order.role == "rank" else None,
            "heard": _now() - (time.monotonic() - ear.heard),
            "replaced": replaced,
            "log": str(order.folder.log.relative_to(order.folder.root)),
        }


def _now() -> float:
    """Seconds since 1970."""
    return datetime.now(UTC).timestamp()
