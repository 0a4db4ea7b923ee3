"""The data of a job: tokenized rows in columns, and an order over them.

A table is memory-mapped from the cache on disk, or held in memory.

    cache_dir/<key>/COLUMN…          ROWS (sft): ids, loss_mask, the answer's span first, last, starts of branches,
                                     trained tokens of the beginning and of each branch
                                     TREES (all else): prompt, answers, facts (JSON text)
    cache_dir/<key>/summary.json     what was found while tokenizing, and the sha256 of each column file
    cache_dir/<key>/verified.json    what the file system says of the files since they had these checksums

A folder is made aside and renamed, so that it is whole or not there; one that was damaged later is found by
its checksums and made again. Files are read for that only where the file system says that they were changed.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from runner.core.file_lock import FileLock
from runner.core.fsync_io import sha256
from runner.data.cache_files import cache_lock, file_state, lock_path
from runner.data.columns import ColumnWriter, read_columns
from runner.data.items import QUESTIONS
from runner.data.sampling_order import RefillOrders, apportion
from runner.data.table_rows import rows_of_tables
from runner.interfaces import EvalQuestion
from runner.interfaces.media import ImageEntry
from runner.run_dir.manifest import PromptStyle
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 11  # raise it when the files are laid out or summed up in another way, so that no old cache is used
IDS = pa.list_(pa.int32())
ROWS = pa.schema(
    [
        *(("ids", IDS), ("loss_mask", pa.list_(pa.int8()))),
        *(("first", pa.int32()), ("last", pa.int32())),
        *(("branches", pa.list_(pa.int32())), ("trained", pa.list_(pa.int32()))),
    ]
)
PROMPTS_WITH_ANSWERS = pa.schema([("prompt", IDS), ("answers", pa.list_(IDS)), ("facts", pa.large_string())])
IMAGE_COLUMN = "images"  # of the tables of an image-text model, whose ids do not fit into 32 bits
IMAGE_TYPES = {"path": pa.large_string(), "several": pa.bool_()}


def schema_with_images(schema: pa.Schema) -> pa.Schema:
    """The schema of rows whose ids may stand for images, with these in a column of their own."""
    wide = {IDS: pa.list_(pa.int64()), pa.list_(IDS): pa.list_(pa.list_(pa.int64()))}
    images = pa.struct([(one.name, IMAGE_TYPES.get(one.name, pa.int64())) for one in fields(ImageEntry)])
    given = [(one.name, wide.get(one.type, one.type)) for one in schema]
    return pa.schema([*given, (IMAGE_COLUMN, pa.list_(images)), ("media", pa.int64())])


SUMMARY, VERIFIED = "summary.json", "verified.json"
Record = dict[str, Any]
Summary = dict[str, Any]
Write = Callable[[pa.RecordBatch], None]
Fill = Callable[[Write], Summary]  # writes all rows and says what it found


class TokenizedTable:
    """Tokenized rows, read at first use.

    pyarrow alone reads them: `datasets` would import pandas and cost each process half a processor second.
    """

    def __init__(self, columns: pa.RecordBatch) -> None:
        self._columns = columns
        self._values: dict[str, tuple[NDArray[np.int64], Any]] = {}

    def __len__(self) -> int:
        return self._columns.num_rows

    @cached_property
    def media(self) -> NDArray[np.int64] | None:
        """How many tokens of each row are places of images, int64 [rows]; None in a table without images."""
        return self._columns.column("media").to_numpy() if "media" in self._columns.schema.names else None

    @cached_property
    def images(self) -> list[ImageEntry]:
        """The images of all rows."""
        found: dict[int, ImageEntry] = {}
        if IMAGE_COLUMN in self._columns.schema.names:
            for one in self._columns.column(IMAGE_COLUMN).flatten().to_pylist():
                found[one["id"]] = ImageEntry(**one)
        return list(found.values())

    def values(self, name: str) -> tuple[NDArray[np.int64], Any]:
        """Of a column of lists: where each row begins and the last one ends, and the values of all rows.

        NAME.item: the lists in a column of lists of lists, one after the other, whose values are those of all.
        """
        if name not in self._values:
            column = self._columns.column(name.removesuffix(".item"))
            column = column.values if name.endswith(".item") else column
            nested = pa.types.is_nested(column.type.value_type)
            self._values[name] = column.offsets.to_numpy(), None if nested else column.values.to_numpy()
        return self._values[name]

    def text(self, name: str, row: int) -> str:
        """The text of a row."""
        return self._columns.column(name)[row].as_py()

    def cell(self, name: str, row: int) -> NDArray[np.integer]:
        """The list of a row in a column of lists."""
        offsets, values = self.values(name)
        return values[offsets[row] : offsets[row + 1]]

    def lengths(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lengths of the lists of some rows, int64 [rows]."""
        offsets, _ = self.values(name)
        return offsets[rows + 1] - offsets[rows]

    def record(self, row: int) -> Record:
        """All that is stored of a row."""
        return self._columns.slice(row, 1).to_pylist()[0]


def build_in_memory(schema: pa.Schema, fill: Fill) -> tuple[TokenizedTable, Summary]:
    """The table that `fill` writes, nothing on disk."""
    files: dict[str, BytesIO] = defaultdict(BytesIO)
    summary = fill(ColumnWriter(schema, files.__getitem__).write)
    return TokenizedTable(read_columns(schema, lambda name: pa.py_buffer(files[name].getbuffer()))), summary


def load_or_build(
    folder: Path, schema: pa.Schema, fill: Fill, report_damage: Callable[[str], None]
) -> tuple[TokenizedTable, Summary]:
    """The table in `folder`; `fill` makes it where it is missing, damaged, or of images that have changed.

    `report_damage` gets what is damaged.
    One process of a machine at a time looks and makes it: the ranks of a job need the same one at once.
    Raises StorageError where it cannot be written.
    """
    with cache_lock(folder):
        if folder.exists() and (fault := _damage(folder, schema)):
            report_damage(f"damaged: {folder}: {fault}")
            shutil.rmtree(folder)
        if not folder.exists():
            _build(folder, schema, fill)
        summary: Summary = json.loads((folder / SUMMARY).read_text())["summary"]
        return _open(folder, schema), summary


def _open(folder: Path, schema: pa.Schema) -> TokenizedTable:
    def read(name: str) -> pa.Buffer:
        path = folder / name
        return pa.memory_map(str(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")

    return TokenizedTable(read_columns(schema, read))


def _build(folder: Path, schema: pa.Schema, fill: Fill) -> None:
    _remove_leftovers(folder)
    aside = _staging(folder)
    aside.mkdir(mode=0o700)
    try:
        with ExitStack() as files:
            writer = ColumnWriter(schema, lambda name: files.enter_context((aside / name).open("wb")))
            summary = fill(writer.write)
            writer.sync()
        digests = {name: digest.hexdigest() for name, digest in writer.digests.items()}
        (aside / SUMMARY).write_text(json.dumps({"sha256": digests, "summary": summary}, indent=2))
        _note_verified(aside, digests)
        _rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _staging(folder: Path) -> Path:
    return folder.with_name(f".staging-{folder.name}-{platform.node()}")


def _remove_leftovers(folder: Path) -> None:
    """Delete what killed processes of this machine have left; `folder` is locked by this one."""
    shutil.rmtree(_staging(folder), ignore_errors=True)
    for left in folder.parent.glob(str(_staging(Path("*")))):
        with suppress(BlockingIOError), FileLock(lock_path(folder.with_name(left.name.split("-")[1]))) as lock:
            lock.acquire()
            shutil.rmtree(left, ignore_errors=True)


def _rename(aside: Path, folder: Path) -> None:
    """Put the folder in place; another process that was faster has made the same one."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _damage(folder: Path, schema: pa.Schema) -> str:
    """What is damaged in a cache folder, or nothing."""
    try:
        digests = json.loads((folder / SUMMARY).read_text())["sha256"]
        if _file_states(folder, digests) != _noted_states(folder):
            for name, wanted in digests.items():
                if sha256(folder / name) != wanted:
                    return f"the checksum of {name} does not match"
            with suppress(OSError):  # the next start computes the checksums again
                _note_verified(folder, digests)
        changed = next((one.path for one in _open(folder, schema).images if not _is_unchanged(one)), None)
        return f"{changed} has changed" if changed else ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _noted_states(folder: Path) -> Any:
    """What `_note_verified` wrote; None where it cannot be read."""
    try:
        return json.loads((folder / VERIFIED).read_text())
    except (OSError, ValueError):
        return None


def _note_verified(folder: Path, names: Iterable[str]) -> None:
    (folder / VERIFIED).write_text(json.dumps(_file_states(folder, names)))


def _file_states(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """What the file system says of each file, which changes when it is written, copied or put back."""
    return {name: file_state(folder / name) for name in (SUMMARY, *names)}


def _is_unchanged(image: ImageEntry) -> bool:
    """Whether an image's file has the size and time of change that it had."""
    path = Path(image.path)
    return path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (image.size, image.mtime_ns)


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of one or several tables, and how many of them are used."""

    tables: Sequence[TokenizedTable]
    limit: int | None  # None = all

    @property
    def total(self) -> int:
        """Number of rows of all tables."""
        return sum(map(len, self.tables))

    def __len__(self) -> int:
        return min(self.total, self.limit or self.total)

    def spots(self) -> NDArray[np.int64]:
        """(table, row), int64 [n, 2], of the first rows of each table, as many as its size has a share of."""
        counts = apportion([len(table) for table in self.tables], len(self))
        return np.array([(table, row) for table, count in enumerate(counts) for row in range(count)])

    def records(self) -> list[Record]:
        """All that is stored of the rows that are used."""
        return [self.tables[table].record(row) for table, row in self.spots().tolist()]


@dataclass(frozen=True)
class TokenizedData:
    """Items of one or several tables in a seeded order, and what is held out."""

    kind: ItemKind
    tables: Sequence[TokenizedTable]
    rounds: RefillOrders
    fingerprint: str
    prompt_style: PromptStyle  # chat where any source has messages
    tokenizer: PreTrainedTokenizerBase
    columns: frozenset[str]  # those that rewards see in any row; of pairs, the optional ones
    longest: int  # tokens of the longest item, held-out ones too
    evaluation: HeldOut | None = None

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def take(self, step: int, count: int, round: int = 0) -> Sequence[Any]:
        """Items step·count … of the round's endless order; a pure function of its arguments."""
        return rows_of_tables(self.kind, self.tables, self.rounds.take(step, count, round), self.tokenizer)

    def held_out_questions(self) -> Sequence[EvalQuestion]:
        """The first held-out rows in file order, as many as are used; empty if there are no prompts."""
        make = QUESTIONS.get(self.kind)
        records = self.evaluation.records() if make and self.evaluation else ()
        return tuple(make(record, self.tokenizer) for record in records) if make else ()

    def held_out_items(self) -> Sequence[Any]:
        """The first held-out pairs or judged answers, as many as are used; empty for the other kinds."""
        if self.kind in QUESTIONS or not self.evaluation:
            return ()
        return tuple(rows_of_tables(self.kind, self.evaluation.tables, self.evaluation.spots(), self.tokenizer))


def no_data(config: object, **parts: Any) -> None:
    """Nothing to build for data=none."""
