"""SIGINT and SIGTERM, noted for the engine to pass on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """The signals that came while they were noted, in their order."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals inside the block. SIGINT stays ignored where the parent ignores it (nohup)."""
        before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._receive)
        try:
            yield
        finally:
            for noted, handler in before.items():
                signal.signal(noted, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
