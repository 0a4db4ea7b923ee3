"""Follows the metrics of a running job, whose file may be replaced when the job is resumed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


class Watch:
    """The newest step and the newest value of each metric of one job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1  # its inode: a resumed run writes the lines that it keeps into a new one
        self._offset = 0
        self.step = 0
        self.first: int | None = None  # the first step that was seen: what a resumed job did before is not its pace
        self.values: dict[str, float] = {}
        self.steps: dict[str, int] = {}  # when each of them was measured

    @property
    def made(self) -> int:
        """Steps made while it was watched."""
        return self.step - (self.step if self.first is None else self.first)

    def look(self) -> None:
        """Read the lines that came since the last look."""
        try:
            with self._path.open("rb") as file:
                self._seek(file)
                content = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # a damaged line, which the results will name; here it is only not shown
                self._take(json.loads(line))
        self.first = self.step if self.first is None else min(self.first, self.step)

    def _seek(self, file: Any) -> None:
        inode = os.fstat(file.fileno()).st_ino
        if inode != self._file:
            self._file, self._offset, self.step, self.values, self.steps = inode, 0, 0, {}, {}
        file.seek(self._offset)

    def _take(self, row: dict[str, Any]) -> None:
        self.step = int(row.pop("step", self.step))
        measured = {name: value for name, value in row.items() if isinstance(value, int | float)}
        self.values |= measured
        self.steps |= dict.fromkeys(measured, self.step)
