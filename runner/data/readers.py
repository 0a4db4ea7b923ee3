"""Files to rows, strictly: nothing is coerced, skipped or guessed, and every fault names file and line.

    data.path ──find_files──▶ files ──read_file──▶ Row, Row, …      faults ──▶ Problems

`datasets` does not parse the text: its JSON reader turns a column of strings into integers or dates when
some values look like them, and lets broken bytes and missing columns pass. No torch, no transformers here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.data.csv_reader import read_csv
from runner.data.json_reader import read_json, read_jsonl
from runner.data.rows import Place, Problems, Row
from runner.errors import DataError


@dataclass(frozen=True, slots=True)
class FileList:
    """The data files under a path, sorted by name, and the other files that lie beside them in a folder."""

    files: tuple[Path, ...]
    ignored: tuple[Path, ...] = ()


def find_files(path: str, key: str = "data.path") -> FileList:
    """The file called `path`, or all data files in the folder `path` and below, hidden ones excepted.

    Raises DataError if there is none.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        found = sorted(f for f in root.rglob("*") if f.is_file() and not _hidden(f.relative_to(root)))
        files = tuple(f for f in found if _suffix(f) in READERS)
        if not files:
            raise DataError(f"{key}={path}: the folder holds no data file; expected {', '.join(READERS)}")
        return FileList(files, tuple(f for f in found if _suffix(f) not in READERS))
    if not root.exists():
        raise DataError(f"{key}={path}: no such file or folder{_nearest(root)}")
    if _suffix(root) not in READERS:
        raise DataError(
            f"{key}={path}: a file of this kind is not read; expected {', '.join(READERS)}, or a folder of them"
        )
    return FileList((root,))


def read_file(file: Path, problems: Problems) -> Iterator[Row]:
    """Every row of one file in order; a faulty row is left out and added to `problems`."""
    try:
        if file.stat().st_size == 0:
            problems.add(str(file), "the file is empty; expected at least one row")
            return
        yield from READERS[_suffix(file)](file, problems)
    except OSError as error:
        problems.add(str(file), f"cannot be read: {error.strerror or error}")


def without_nulls(value: Any) -> Any:
    """`value` without the keys whose value is null, at any depth.

    Arrow gives every object in a column the same keys and fills the missing ones with null.
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _read_parquet(file: Path, problems: Problems) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=1000):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(Place(str(file), number, "row"), without_nulls(value))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        problems.add(str(file), f"broken Parquet after row {number}: {error}")
        return
    if not number:
        problems.add(str(file), "no rows; expected at least one")


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _nearest(path: Path) -> str:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""


READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": _read_parquet,
}
