"""Files and folders to rows: which files a path means, and the reader of each by the end of its name.

    data.path ──find_files──▶ files ──read_file──▶ Row = (SourceLocation, columns)    faults ──▶ Problems, one DataError

    text      .jsonl .ndjson .json .csv .tsv .txt, and each of them with .gz        runner/data/readers.py
    Arrow     .parquet, .arrow (stream or file format)
    folder    all data files in it and below; or one that `datasets` saved with save_to_disk, with or without splits

`datasets` does not parse the text: its JSON reader turns a column of strings into integers or dates when some values
look like them, and lets broken bytes and missing columns pass. No torch, no transformers, no datasets here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import DataError
from runner.core.untrusted_text import parse_json, without_nulls
from runner.data.cache_files import file_digest
from runner.data.readers import Problems, Row, SourceLocation, read_csv, read_json, read_jsonl, read_text

if TYPE_CHECKING:
    import pyarrow as pa

HUB_ID = re.compile(r"[\w-]+/[\w.-]+")
SPLITS = "dataset_dict.json"  # of a folder with one saved data set per split
STATE = "state.json"  # of one saved data set
RECORDS = (SPLITS, STATE, "dataset_info.json", "dataset_infos.json")  # JSON files of `datasets` that hold no rows
# words in the names of files and folders, as `datasets` knows them
TRAINING_SPLIT = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
HELD_OUT_SPLIT = re.compile(r"(?<![a-z])(test(ing)?|eval(uation)?|val(id(ation)?)?|dev)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FileList:
    """The data files under a path, sorted by name; `ignored`: files beside them that are not read."""

    files: tuple[Path, ...]
    ignored: tuple[str, ...] = ()


def find_files(path: str, key: str = "data.path") -> FileList:
    """The file called `path`, all data files in the folder `path` and below, or those of a saved data set.

    Hidden files are left out, and where files are named after the split train, those of other splits. Text files (.txt)
    of a folder are read if it has no other data files; beside others they are notes. Raises DataError if there is no
    data file.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{key}={path}: no such file or folder{_path_hint(path, root)}")
    if not root.is_dir():
        if reader_of(root) is None:
            raise DataError(f"{key}={path}: unsupported file type; expected {_supported_types()}, or a folder of them")
        return FileList((root,))
    if (root / SPLITS).is_file():
        return _saved_splits(root, key)
    if (root / STATE).is_file() and (root / "dataset_info.json").is_file():
        return FileList(_saved_files(root, key))
    below = (f for f in root.rglob("*") if not any(part.startswith(".") for part in f.relative_to(root).parts))
    found = sorted(f for f in below if f.is_file())
    files = [f for f in found if reader_of(f) is not None and f.name not in RECORDS]
    rows = [f for f in files if reader_of(f) is not read_text] or files
    if not rows:
        raise DataError(f"{key}={path}: the folder has no data file; expected {_supported_types()}")
    training = [f for f in rows if TRAINING_SPLIT.search(str(f.relative_to(root)))]
    held_out = [f for f in rows if f not in training and HELD_OUT_SPLIT.search(str(f.relative_to(root)))]
    other = held_out if training else []
    ignored = [f.name for f in found if f not in rows]
    ignored += [f"{f.name} of another split than train (data.eval_path={f} evaluates on it)" for f in other]
    return FileList(tuple(f for f in rows if f not in other), tuple(ignored))


def _saved_splits(root: Path, key: str) -> FileList:
    """The split `train` of a saved DatasetDict, or its only one."""
    splits = _read_record(root / SPLITS, key).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
        raise DataError(f"{key}={root}: {SPLITS} names no splits; save the data set again with save_to_disk")
    if len(splits) > 1 and "train" not in splits:
        names = ", ".join(splits)
        raise DataError(f"{key}={root}: a saved data set with splits {names}; type one: {key}={root / splits[0]}")
    split = "train" if "train" in splits else splits[0]
    others = tuple(f"split {name} ({key}={root / name} reads it)" for name in splits if name != split)
    return FileList(_saved_files(root / split, key), others)


def _saved_files(root: Path, key: str) -> tuple[Path, ...]:
    """The Arrow files of a saved data set, in its own order."""
    try:
        files = tuple(root / file["filename"] for file in _read_record(root / STATE, key)["_data_files"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{key}={root}: {STATE} names no data files; save the data set with save_to_disk") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(f"{key}={root}: the saved data set lacks {', '.join(missing) or 'data files'}; copy it again")
    return files


def _read_record(file: Path, key: str) -> dict[str, Any]:
    try:
        value = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {file} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def read_file(file: Path, problems: Problems) -> Iterator[Row]:
    """Every row of one file in order; a faulty row is left out and added to `problems`."""
    reader = reader_of(file)
    assert reader is not None  # find_files names no other
    try:
        if file.stat().st_size == 0:
            problems.add_fault(str(file), "the file is empty; expected at least one row")
            return
        yield from reader(file, problems)
    except (OSError, EOFError, zlib.error) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problems.add_fault(str(file), f"cannot be read: {text}")


def _read_parquet(file: Path, problems: Problems) -> Iterator[Row]:
    import pyarrow.parquet as pq

    def batches() -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(file) as parquet:
            yield from parquet.iter_batches(batch_size=1000)

    return _read_batches(file, batches(), "Parquet", problems)


def _read_arrow(file: Path, problems: Problems) -> Iterator[Row]:
    import pyarrow as pa

    def batches() -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(file)) as source:
            if source.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(source)
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                source.seek(0)
                yield from pa.ipc.open_stream(source)

    return _read_batches(file, batches(), "Arrow", problems)


def _read_batches(file: Path, batches: Iterator[pa.RecordBatch], kind: str, problems: Problems) -> Iterator[Row]:
    import pyarrow as pa

    number = 0
    try:
        for batch in batches:
            json_columns = _json_columns(batch.schema.metadata or {})
            for value in batch.to_pylist():
                number += 1
                for name, feature in json_columns.items():
                    value[name] = _decode_json(value[name], feature)
                yield Row(SourceLocation(str(file), number, "row"), without_nulls(value))
    except (pa.ArrowException, ValueError) as error:
        problems.add_fault(str(file), f"broken {kind} after row {number}: {error}")
        return
    if not number:
        problems.add_fault(str(file), "no rows; expected at least one")


def _json_columns(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Columns in which `datasets` stores objects of different keys as JSON text, with their types."""
    described = parse_json(metadata.get(b"huggingface", b"{}"))
    features = described.get("info", {}).get("features") or {}
    return {name: feature for name, feature in features.items() if '"_type": "Json"' in json.dumps(feature)}


def _decode_json(value: Any, feature: Any) -> Any:
    """The value as it was before `datasets` wrote its parts of type Json as text."""
    if value is None or not isinstance(feature, dict):
        return value
    kind = feature.get("_type")
    if kind == "Json":
        return parse_json(value) if isinstance(value, str) else value
    if kind in ("List", "LargeList") and isinstance(value, list):
        return [_decode_json(item, feature.get("feature")) for item in value]
    if isinstance(value, dict):
        return {name: _decode_json(item, feature.get(name)) for name, item in value.items()}
    return value


def reader_of(file: Path) -> Callable[[Path, Problems], Iterator[Row]] | None:
    """The reader of a file by the end of its name; None for a file that is not read."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return TEXT_READERS.get(Path(file.stem).suffix.lower())
    return TEXT_READERS.get(suffix) or ARROW_READERS.get(suffix)


def _supported_types() -> str:
    return f"{', '.join(TEXT_READERS)} (each also .gz), {', '.join(ARROW_READERS)}"


def _path_hint(given: str, path: Path) -> str:
    """What may have been meant by a path where nothing is."""
    if "://" in given:
        return "; only files on this machine are read: download it first"
    if set(given) & set("*?["):
        return "; patterns are not expanded: type the folder, or a list of files, [a.jsonl,b.jsonl]"
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    if close := difflib.get_close_matches(path.name, names, n=1):
        return f"; did you mean {path.with_name(close[0])}?"
    return f"; a data set of the hub is data=hub data.path={given}" if HUB_ID.fullmatch(given) else ""


TEXT_READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".txt": read_text,
}
ARROW_READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {".parquet": _read_parquet, ".arrow": _read_arrow}


MOST_HASHED_BYTES = 2**30  # of a stream: seconds of hashing at each start
SAMPLE_BYTES = 2**20


def _sample(file: Path) -> str:
    """Size, time of change in seconds, and sha256 of the first and the last MiB of a file."""
    known = file.stat()
    with file.open("rb") as handle:
        parts = hashlib.sha256(handle.read(SAMPLE_BYTES))
        handle.seek(max(known.st_size - SAMPLE_BYTES, 0))
        parts.update(handle.read(SAMPLE_BYTES))
    return f"{known.st_size} {int(known.st_mtime)} {parts.hexdigest()}"


@dataclass(frozen=True)
class FileSource:
    """A file or a folder of files, in the order of their names."""

    name: str
    file_list: FileList
    key: str = "data.path"
    streamed: bool = False

    @cached_property
    def is_sampled(self) -> bool:
        """Whether `digest` reads parts of the files only: those of a large stream."""
        return self.streamed and sum(file.stat().st_size for file in self.file_list.files) > MOST_HASHED_BYTES

    def digest(self, notes: Path | None = None) -> str:
        """sha256 over the names and bytes of all files; see `file_digest` for `notes`.

        Where it is sampled: over their names, sizes, modification times, and first and last MiB.
        """
        total = hashlib.sha256()
        for file in self.file_list.files:
            content = _sample(file) if self.is_sampled else file_digest(file, notes)
            total.update(f"{file.name}:{content}\n".encode())
        return total.hexdigest()

    def image_folders(self) -> list[str]:
        """The folder of each file, which its relative paths of images begin at."""
        return [str(file.parent.resolve()) for file in self.file_list.files]

    def rows(self, problems: Problems, most: int | None = None) -> Iterator[Row]:
        """The rows of every file, of each the first `most`."""
        for file in self.file_list.files:
            yield from islice(read_file(file, problems), most)


def find_sources(
    paths: Sequence[str], eval_path: str | None, streamed: bool = False
) -> tuple[list[FileSource], FileSource | None]:
    """(training sources, held-out source). Raises DataError for a path where no data file is."""
    training = [FileSource(path, find_files(path), streamed=streamed) for path in paths]
    if eval_path is None:
        return training, None
    return training, FileSource(eval_path, find_files(eval_path, "data.eval_path"), "data.eval_path")
