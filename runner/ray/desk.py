"""The driver's end of the line: requests in, events out, a line of JSON each."""

from __future__ import annotations

import json
import os
import selectors
from contextlib import suppress
from typing import Any


class Desk:
    """Takes stdin and stdout for the line; whatever Ray prints goes to stderr."""

    def __init__(self) -> None:
        self._output, self._rest = os.dup(1), b""
        os.dup2(2, 1)
        os.set_blocking(0, False)
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(0, selectors.EVENT_READ)

    def tell(self, **event: Any) -> None:
        """One line; nobody may read it any more."""
        content = json.dumps(event).encode() + b"\n"
        with suppress(BrokenPipeError):
            while content:
                content = content[os.write(self._output, content) :]

    def requests(self, wait_s: float) -> list[dict[str, Any]] | None:
        """What was asked, after at most so many seconds; None: nobody asks any more."""
        lines: list[bytes] = []
        if self._waiting.select(wait_s):
            if not (chunk := os.read(0, 1 << 16)):
                return None
            *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines]
