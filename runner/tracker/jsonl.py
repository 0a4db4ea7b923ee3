"""metrics.jsonl and samples.jsonl: the record of a run, from which every tracker can be replayed.

    log(step, metrics) ─▶ one write of one line ─▶ metrics.jsonl        {"step": 7, "train/loss": 0.5, ...}
    truncate_after(folder, step, attempt): lines after `step`, or incomplete ─▶ attempts/<attempt>/*.jsonl

A line holds numbers only, "step" (finished steps, counted from 1) first. JSON has no NaN and no infinity:
a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import RunnerError
from runner.core.fsync_io import storage_errors
from runner.run_dir.folder import RunFolder, write_atomic
from runner.run_dir.manifest import redact_values

if TYPE_CHECKING:
    from runner.tracker.config import NoTrackerConfig


# Terminals interpret these like escape sequences; JSON does not escape them.
_C1 = re.compile("[\x7f-\x9f]")
CHUNK_BYTES = 1 << 20  # of a read from a growing file


class JsonlTracker:
    """Appends to the two files of `folder`; when a call returns, the kernel has the complete line.

    Raises RunnerError if a step repeats or decreases, or a metric is not a number (bugs of this project), StorageError
    if it cannot be written.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._metrics = _Appender(folder.metrics)
        self._samples = _Appender(folder.samples)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a finished step."""
        if step <= self._metrics.last:
            raise RunnerError(f"{self._metrics.path}: step {step} after step {self._metrics.last}")
        self._metrics.write(step, [_record(step, {name: _number(name, value) for name, value in metrics.items()})])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write one line per row, with possible secrets masked."""
        if step < self._samples.last:
            raise RunnerError(f"{self._samples.path}: step {step} after step {self._samples.last}")
        if rows:
            self._samples.write(step, [_record(step, redact_values(_finite(row))) for row in rows])

    def finish(self, status: str) -> list[str]:
        """Flush both files to the disk and close them; returns no message."""
        for file in (self._metrics, self._samples):
            file.close()
        return []


def truncate_after(folder: RunFolder, step: int, attempt: int) -> int:
    """Prepare both files for continuing after `step`: later lines move to attempts/<attempt>/.

    Incomplete and invalid lines move too. At step 0 all lines move, because the run starts again. A crash loses
    nothing, and the call can be repeated. Returns the number of moved lines of metrics.jsonl.
    """
    moved = 0
    for path in (folder.metrics, folder.samples):
        if not path.exists():
            continue
        content = path.read_bytes()
        kept, cut = _split(content, step)
        if cut:
            _append_once(folder.attempts / str(attempt) / path.name, "".join(cut))
        if cut or not content.endswith(b"\n"):  # the last line may lack only its newline
            write_atomic(path, "".join(kept))
        moved += len(cut) if path == folder.metrics else 0
    return moved


def missing_steps(folder: RunFolder, step: int) -> str:
    """Missing or repeated lines of steps 1 … `step` in metrics.jsonl; empty if it is complete."""
    found = list(_steps(folder.metrics))
    wanted, held = range(1, step + 1), set(found)
    begins = [at for at in wanted if at not in held and (at - 1 in held or at == 1)]
    ends = [at for at in wanted if at not in held and (at + 1 in held or at == step)]
    gaps = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in zip(begins, ends, strict=True)]
    problems = [f"missing {', '.join(gaps)}"] if gaps else []
    return "; ".join(problems + (["its steps are not in order"] if found != sorted(held) else []))


def _split(content: bytes, step: int) -> tuple[list[str], list[str]]:
    """Lines of steps up to `step`, and all others; each ends with a newline."""
    kept: list[str] = []
    cut: list[str] = []
    for raw in content.decode("utf-8", "backslashreplace").split("\n"):
        if raw:
            at = _step_of(raw)
            (kept if step > 0 and at is not None and at <= step else cut).append(raw + "\n")
    return kept, cut


def _step_of(line: str) -> int | None:
    """The step of a line; None if the line is damaged."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    at = record.get("step") if isinstance(record, dict) else None
    return at if isinstance(at, int) else None


def _append_once(path: Path, text: str) -> None:
    """Append `text` to a file unless it already ends with it, after a crash before the truncation."""
    with storage_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
    if not before.endswith(text):
        write_atomic(path, before + text)


def _record(step: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    if "step" in fields:
        raise RunnerError('a metric or a field of a sample cannot be named "step"')
    return {"step": step, **fields}


def _finite(value: Any) -> Any:
    """The plain data with null for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _number(name: str, value: float) -> float | None:
    """The value for JSON: null if it is not finite."""
    if not isinstance(value, int | float):
        raise RunnerError(f"metric {name!r} is a {type(value).__name__}, not a number")
    if isinstance(value, bool):
        return int(value)
    return value if math.isfinite(value) else None


class _Appender:
    """An append-only file of JSON lines. last: its last step, -1 if it is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = max(_steps(path), default=-1)
        with storage_errors(f"cannot write {path}"):
            self._handle: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append one line per record. Raises StorageError."""
        text = "".join(_line(record) for record in records)
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        if self._handle is None:
            raise RunnerError(f"{self.path}: written to after the end of the run")
        with storage_errors(f"cannot write {self.path}", "; free disk space, then type: run resume"):
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        self.last = step

    def close(self) -> None:
        """Flush to the disk and close, once. Raises StorageError."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        try:
            with storage_errors(f"cannot write {self.path}"):
                os.fsync(handle)
        finally:
            os.close(handle)


def _line(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
    return _C1.sub(lambda m: f"\\u{ord(m[0]):04x}", text) + "\n"


def _steps(path: Path) -> Iterator[int]:
    """The step of each line. Raises RunnerError for a damaged line, which `truncate_after` removes."""
    if not path.exists():
        return
    content = path.read_text(encoding="utf-8", errors="replace")
    if content and not content.endswith("\n"):
        raise RunnerError(f"{path}: the last line is incomplete; a resume must truncate the file first")
    for number, raw in enumerate(content.split("\n")[:-1], 1):
        at = _step_of(raw)
        if at is None:
            raise RunnerError(f"{path}:{number}: not a line of a step; a resume must truncate the file first")
        yield at


class JsonlTail:
    """Reads new lines of a file to which another process appends; only complete lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[dict[str, Any]]:
        """Complete lines since the last call, at most about 1 MiB; none if the file does not exist.

        Raises ValueError for a line that is not JSON.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(CHUNK_BYTES)
                if not chunk.endswith(b"\n"):
                    chunk += file.readline()  # a line that is longer than a chunk, or incomplete
        except FileNotFoundError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def complete_lines(path: Path, size: int = sys.maxsize) -> list[str]:
    """The complete lines of a file, or those within its last `size` bytes; none if it does not exist."""
    try:
        with path.open("rb") as file:
            start = max(file.seek(0, 2) - size, 0)
            file.seek(start)
            return file.read().decode("utf-8", "replace").split("\n")[bool(start) : -1]
    except FileNotFoundError:
        return []


class NoTracker:
    """A tracker that does nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def finish(self, status: str) -> list[str]:
        """Return no message."""
        return []


def no_tracker(config: NoTrackerConfig, **context: Any) -> NoTracker:
    """The tracker of tracker=none."""
    return NoTracker()
