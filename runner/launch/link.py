"""What a process of a job tells the one that started it: that it lives, which step it is in, and why it ends.

Link (any process) ──pipe: {"where": …} first, {"step": 7} each second, {"report": …} at its end──▶ Ear (launcher)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from runner.core.subprocess import JsonLines
from runner.errors import DeadlineExceeded, Interrupted, RankLost, RunnerError
from runner.place import Machine

BEAT_S = 1.0
WAITED = (DeadlineExceeded, RankLost)  # what a rank ends with because another one does not answer


class Report(NamedTuple):
    """Why a rank ends. `kind`: error, waited (for another rank), or interrupted; `when`: seconds since 1970."""

    kind: str
    message: str
    exit_code: int
    when: float

    @classmethod
    def of(cls, error: RunnerError) -> Self:
        """The report of an error, now."""
        kind = "waited" if isinstance(error, WAITED) else "interrupted" if isinstance(error, Interrupted) else "error"
        return cls(kind, str(error), error.exit_code, datetime.now(UTC).timestamp())


class Link:
    """The started process's end. A thread says each second that it lives, which it cannot do while it is stopped."""

    def __init__(self, handle: int) -> None:
        os.set_inheritable(handle, False)  # what the rank starts must not keep the pipe open
        self._lines, self._step = JsonLines(writing=handle), 0
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def step(self, step: int) -> None:
        """So many steps are finished."""
        self._step = step

    def report(self, report: Report) -> None:
        """The last words."""
        self._lines.send({"report": report})

    def _beat(self) -> None:
        here = Machine.here()
        self._lines.send({"where": {"host": here.host, "boot_id": here.boot_id, "pid": os.getpid()}})
        while True:
            self._lines.send({"step": self._step})
            time.sleep(BEAT_S)


@dataclass(slots=True)
class Ear:
    """The launcher's end: what one process has said so far, and when it was heard last.

    handle: the pipe's descriptor; None where what it says is brought (`take`) by other means
    """

    handle: int | None = None
    heard: float = field(default_factory=time.monotonic)
    begun: bool = False  # it has spoken
    step: int = 0
    where: dict[str, Any] = field(default_factory=dict)  # host, boot_id, pid, once it has said so
    report: Report | None = None
    open: bool = True
    _lines: JsonLines = field(init=False)

    def __post_init__(self) -> None:
        self._lines = JsonLines(self.handle)

    def listen(self) -> None:
        """Take in what is there."""
        if self.open and self.handle is not None:
            if (messages := self._lines.receive()) is None:
                self.close()
            else:
                self._understand(messages)

    def take(self, content: bytes) -> None:
        """Hear this now."""
        self._understand(self._lines.feed(content))

    def close(self) -> None:
        """End it."""
        if self.open:
            self.open = False
            if self.handle is not None:
                os.close(self.handle)

    def _understand(self, messages: Sequence[dict[str, Any]]) -> None:
        for message in messages:
            self.heard, self.begun = time.monotonic(), True
            if "report" in message:
                self.report = Report(*message["report"])
            elif "where" in message:
                self.where = dict(message["where"])
            else:
                self.step = int(message["step"])
