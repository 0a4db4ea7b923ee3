"""Output of a user's code: first lines are shown, all up to a limit is kept in the run folder.

What looks like a secret is masked.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock

from runner.run_dir.manifest import redact

log = logging.getLogger("runner")
SAID_LINES = 20
KEPT_BYTES = 8 << 20


class CapturedOutput:
    """Takes lines from several threads. Without a folder, what is not said is only counted."""

    def __init__(self, label: str, folder: Path | None) -> None:
        self._label = label
        self._path = None if folder is None else folder / "reward.log"
        self._lock = Lock()
        self._lines = self._kept = self._dropped = 0

    def add_line(self, text: str) -> None:
        """A line that was printed."""
        with self._lock:
            self._lines += 1
            if self._lines <= SAID_LINES:
                log.info("%s| %s", self._label, text)
            if self._lines == SAID_LINES:
                log.info("%s| … further lines go %s", self._label, self._path or "nowhere; they are counted")
            if not self._keep(text) and self._lines > SAID_LINES:
                self._dropped += 1

    def append_to_file(self, text: str) -> None:
        """Text for the file only."""
        with self._lock:
            self._keep(text)

    def close(self) -> None:
        """Say how many lines were not said."""
        if self._lines > SAID_LINES:
            lost = f", {self._dropped} of them dropped" if self._dropped else ""
            where = f" in {self._path}" if self._path is not None else ""
            log.info("%s| %d lines were printed%s%s", self._label, self._lines, where, lost)
        self._lines = self._dropped = 0

    def _keep(self, text: str) -> bool:
        if self._path is None or self._kept > KEPT_BYTES:
            return False
        line = f"{redact(text)}\n".encode(errors="replace")
        self._kept += len(line)
        with self._path.open("ab") as file:
            file.write(line)
        return True
