"""Reads a file of JSON lines while another process appends to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


class JsonlTail:
    """Follows `path` from its beginning; a line counts once its newline is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[dict[str, Any]]:
        """Complete lines since the last call, at most about a MiB of them; none if there is no file yet.

        Raises ValueError for a line that is not JSON.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(CHUNK_BYTES)
                if not chunk.endswith(b"\n"):
                    chunk += file.readline()  # a line that is longer than a chunk, or not finished
        except FileNotFoundError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def last_lines(path: Path, size: int) -> list[str]:
    """The whole lines within the last `size` bytes of a file; none if there is no file yet."""
    try:
        with path.open("rb") as file:
            start = max(file.seek(0, 2) - size, 0)
            file.seek(start)
            return file.read().decode("utf-8", "replace").split("\n")[bool(start) : -1]
    except FileNotFoundError:
        return []
