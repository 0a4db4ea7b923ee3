"""Tokenised rows as an Arrow table: memory-mapped from the cache on disk, or held in memory.

    cache_dir/<key>/tokens.arrow    ids int32, learnt int8 (lists), answer span first, last int32
    cache_dir/<key>/summary.json    what was found while tokenising, and the sha256 of tokens.arrow

A folder is made aside and renamed, so that it is whole or not there; one that was damaged later is found by
its checksum and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import datasets  # type: ignore[import-untyped]
import pyarrow as pa

from runner.data.tokenise import Encoded
from runner.errors import StorageError

SCHEMA = pa.schema(
    [("ids", pa.list_(pa.int32())), ("learnt", pa.list_(pa.int8())), ("first", pa.int32()), ("last", pa.int32())]
)
Summary = dict[str, Any]
Write = Callable[[Sequence[Encoded]], None]
Fill = Callable[[Write], Summary]  # writes all rows and says what it found


class Table:
    """Tokenised rows, read when asked for."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> list[tuple[list[int], list[int], tuple[int, int]]]:
        """(ids, learnt, answer span) of each index, in that order."""
        columns = self._rows[list(indices)]
        spans = zip(columns["first"], columns["last"], strict=True)
        return list(zip(columns["ids"], columns["learnt"], spans, strict=True))


def in_memory(fill: Fill) -> tuple[Table, Summary]:
    """The table that `fill` writes, nothing on disk."""
    sink = pa.BufferOutputStream()
    summary = _write(sink, fill)
    return Table(datasets.Dataset.from_buffer(sink.getvalue())), summary


def on_disk(folder: Path, fill: Fill, damaged: Callable[[str], None]) -> tuple[Table, Summary]:
    """The table in `folder`, made by `fill` if it is not there or damaged; the latter is told to `damaged`.

    Raises StorageError where it cannot be written.
    """
    if folder.exists():
        fault = _fault(folder)
        if fault:
            damaged(f"{folder}: {fault}")
            shutil.rmtree(folder)
    try:
        if not folder.exists():
            _build(folder, fill)
        summary: Summary = json.loads((folder / "summary.json").read_text())["summary"]
    except OSError as error:
        raise StorageError(
            f"cannot write the token cache {folder}: {error.strerror or error}; free space, or set data.cache=false"
        ) from error
    return Table(datasets.Dataset.from_file(str(folder / "tokens.arrow"))), summary


def _build(folder: Path, fill: Fill) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder.parent))
    try:
        with (aside / "tokens.arrow").open("wb") as file:
            summary = _write(file, fill)
            file.flush()
            os.fsync(file.fileno())
        record = {"sha256": sha256(aside / "tokens.arrow"), "summary": summary}
        (aside / "summary.json").write_text(json.dumps(record, indent=2))
        _rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename(aside: Path, folder: Path) -> None:
    """Put the folder in place; another process that was faster has made the same one."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _write(sink: IO[bytes] | pa.NativeFile, fill: Fill) -> Summary:
    with pa.ipc.new_stream(sink, SCHEMA) as writer:

        def write(rows: Sequence[Encoded]) -> None:
            columns = [
                [r.ids for r in rows],
                [r.learnt for r in rows],
                [r.answer[0] for r in rows],
                [r.answer[1] for r in rows],
            ]
            writer.write_batch(
                pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)
            )

        return fill(write)


def _fault(folder: Path) -> str:
    """What is damaged in a cache folder, or nothing."""
    try:
        wanted = json.loads((folder / "summary.json").read_text())["sha256"]
        return "" if sha256(folder / "tokens.arrow") == wanted else "tokens.arrow does not have its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def sha256(file: Path) -> str:
    """Digest of a file's bytes."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
