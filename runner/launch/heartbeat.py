"""What a rank or a rollout server sends to its launcher: heartbeats, its step, and why it ends.

HeartbeatWriter ──pipe: {"where": …} first, {"step": 7} each second, {"report": …} at its end──▶ HeartbeatReader
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from runner.core.errors import DeadlineExceeded, Interrupted, RankLost, RunnerError
from runner.core.rank_info import Host
from runner.core.subprocess import JsonLines

BEAT_S = 1.0
WAITS = (DeadlineExceeded, RankLost)  # errors of a rank to which another rank does not respond


class ExitReport(NamedTuple):
    """Why a rank ends. `kind`: error, waited (for another rank), interrupted; `when`: seconds since 1970."""

    kind: str
    message: str
    exit_code: int
    when: float

    @classmethod
    def from_error(cls, error: RunnerError) -> Self:
        """The report of an error, now."""
        kind = "waited" if isinstance(error, WAITS) else "interrupted" if isinstance(error, Interrupted) else "error"
        return cls(kind, str(error), error.exit_code, datetime.now(UTC).timestamp())


class HeartbeatWriter:
    """Sends a heartbeat every second from a thread of the process, which a stopped process cannot do."""

    def __init__(self, handle: int) -> None:
        os.set_inheritable(handle, False)  # what the rank starts must not keep the pipe open
        self._lines, self._step = JsonLines(writing=handle), 0
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def step(self, step: int) -> None:
        """Set the number of finished steps."""
        self._step = step

    def report(self, report: ExitReport) -> None:
        """Send why this process ends."""
        self._lines.send({"report": report})

    def _beat(self) -> None:
        here = Host.current()
        self._lines.send({"where": {"host": here.host, "boot_id": here.boot_id, "pid": os.getpid()}})
        while True:
            self._lines.send({"step": self._step})
            time.sleep(BEAT_S)


@dataclass(slots=True)
class HeartbeatReader:
    """What one process has sent to the launcher so far, and the time of its last message.

    handle: the pipe's descriptor; None if messages come by other means (`feed`)
    """

    handle: int | None = None
    last_heard: float = field(default_factory=time.monotonic)
    begun: bool = False  # it has sent a message
    step: int = 0
    where: dict[str, Any] = field(default_factory=dict)  # host, boot_id, pid, once it has said so
    report: ExitReport | None = None
    open: bool = True
    _lines: JsonLines = field(init=False)

    def __post_init__(self) -> None:
        self._lines = JsonLines(self.handle)

    def receive(self) -> None:
        """Read what has arrived."""
        if self.open and self.handle is not None:
            if (messages := self._lines.receive()) is None:
                self.close()
            else:
                self._handle_messages(messages)

    def feed(self, content: bytes) -> None:
        """Parse bytes that came by other means."""
        self._handle_messages(self._lines.parse(content))

    def close(self) -> None:
        """Close the pipe."""
        if self.open:
            self.open = False
            if self.handle is not None:
                os.close(self.handle)

    def _handle_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        for message in messages:
            self.last_heard, self.begun = time.monotonic(), True
            if "report" in message:
                self.report = ExitReport(*message["report"])
            elif "where" in message:
                self.where = dict(message["where"])
            else:
                self.step = int(message["step"])
