"""The data of a job: tokenized rows as Arrow tables, and an order over them.

A table is memory-mapped from the cache on disk, or held in memory.

    cache_dir/<key>/tokens.arrow    ROWS (sft): ids, loss_mask, the answer's span first, last, starts of branches
                                    TREES (all else): prompt, answers, facts (JSON text)
    cache_dir/<key>/summary.json    what was found while tokenizing, and the sha256 of tokens.arrow

A folder is made aside and renamed, so that it is whole or not there; one that was damaged later is found by
its checksum and made again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from runner.core.errors import StorageError
from runner.core.file_lock import FileLock
from runner.core.fsync_io import sha256
from runner.data.items import ITEMS, QUESTIONS
from runner.data.sampling_order import RefillOrders, apportion
from runner.interfaces import EvalQuestion
from runner.interfaces.media import ImageEntry
from runner.run_dir.manifest import PromptStyle
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 9  # raise it when the files are laid out or summed up in another way, so that no old cache is used
IDS = pa.list_(pa.int32())
ROWS = pa.schema(
    [("ids", IDS), ("loss_mask", pa.list_(pa.int8())), ("first", pa.int32()), ("last", pa.int32()), ("branches", IDS)]
)
PROMPTS_WITH_ANSWERS = pa.schema([("prompt", IDS), ("answers", pa.list_(IDS)), ("facts", pa.large_string())])
IMAGE_COLUMN = "images"  # of the tables of an image-text model, whose ids do not fit into 32 bits
IMAGE_TYPES = {"path": pa.string(), "several": pa.bool_()}


def schema_with_images(schema: pa.Schema) -> pa.Schema:
    """The schema of rows whose ids may stand for images, with these in a column of their own."""
    wide = {IDS: pa.list_(pa.int64()), pa.list_(IDS): pa.list_(pa.list_(pa.int64()))}
    images = pa.struct([(one.name, IMAGE_TYPES.get(one.name, pa.int64())) for one in fields(ImageEntry)])
    return pa.schema([*((one.name, wide.get(one.type, one.type)) for one in schema), (IMAGE_COLUMN, pa.list_(images))])


Record = dict[str, Any]
Summary = dict[str, Any]
Write = Callable[[pa.RecordBatch], None]
Fill = Callable[[Write], Summary]  # writes all rows and says what it found


class TokenizedTable:
    """Tokenized rows, read at first use.

    pyarrow alone reads them: `datasets` would import pandas and cost each process half a processor second.
    """

    def __init__(self, source: pa.Buffer | pa.NativeFile) -> None:
        """`source` holds an Arrow stream, whose batches are not copied."""
        with pa.ipc.open_stream(source) as stream:
            self._batches = list(stream)
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    def images(self) -> list[ImageEntry]:
        """The images of all rows."""
        found: dict[int, ImageEntry] = {}
        for batch in self._batches if self._batches and IMAGE_COLUMN in self._batches[0].schema.names else ():
            for one in batch.column(IMAGE_COLUMN).flatten().to_pylist():
                found[one["id"]] = ImageEntry(**one)
        return list(found.values())

    def rows(self, indices: Sequence[int]) -> list[Record]:
        """The record of each index, in that order."""
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> Record:
        number = bisect_right(self._starts, index) - 1
        record: Record = self._batches[number].slice(index - self._starts[number], 1).to_pylist()[0]
        return record


def build_in_memory(schema: pa.Schema, fill: Fill) -> tuple[TokenizedTable, Summary]:
    """The table that `fill` writes, nothing on disk."""
    sink = pa.BufferOutputStream()
    summary = _write(sink, schema, fill)
    return TokenizedTable(sink.getvalue()), summary


def load_or_build(
    folder: Path, schema: pa.Schema, fill: Fill, report_damage: Callable[[str], None]
) -> tuple[TokenizedTable, Summary]:
    """The table in `folder`; `fill` makes it where it is missing, damaged, or of images that have changed.

    `report_damage` gets what is damaged.
    One process of a machine at a time looks and makes it: the ranks of a job need the same one at once.
    Raises StorageError where it cannot be written.
    """
    try:
        with _folder_lock(folder):
            if folder.exists() and (fault := _damage(folder)):
                report_damage(f"{folder}: {fault}")
                shutil.rmtree(folder)
            if not folder.exists():
                _build(folder, schema, fill)
        summary: Summary = json.loads((folder / "summary.json").read_text())["summary"]
    except OSError as error:
        raise StorageError(
            f"cannot write the token cache {folder}: {error.strerror or error}; free space, set the variable "
            f"RUNNER_CACHE to another folder, or set data.cache=false"
        ) from error
    return TokenizedTable(pa.memory_map(str(folder / "tokens.arrow"))), summary


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock") as lock:
        lock.acquire(wait=True)
        yield


def _build(folder: Path, schema: pa.Schema, fill: Fill) -> None:
    aside = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder.parent))
    try:
        with (aside / "tokens.arrow").open("wb") as file:
            summary = _write(file, schema, fill)
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


def _write(sink: IO[bytes] | pa.NativeFile, schema: pa.Schema, fill: Fill) -> Summary:
    with pa.ipc.new_stream(sink, schema) as writer:
        return fill(writer.write_batch)


def _damage(folder: Path) -> str:
    """What is damaged in a cache folder, or nothing."""
    try:
        wanted = json.loads((folder / "summary.json").read_text())["sha256"]
        if sha256(folder / "tokens.arrow") != wanted:
            return "the checksum of tokens.arrow does not match"
        images = TokenizedTable(pa.memory_map(str(folder / "tokens.arrow"))).images()
        changed = next((one.path for one in images if not _is_unchanged(one)), None)
        return f"{changed} has changed" if changed else ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


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

    def records(self) -> list[Record]:
        """The first rows of each table, as many as are used, by the tables' sizes."""
        counts = apportion([len(table) for table in self.tables], len(self))
        return [record for table, count in zip(self.tables, counts, strict=True) for record in table.rows(range(count))]


@dataclass(frozen=True)
class TokenizedData:
    """Items of one or several tables in a seeded order, and what is held out."""

    kind: ItemKind
    tables: Sequence[TokenizedTable]
    rounds: RefillOrders
    fingerprint: str
    prompt_style: PromptStyle  # chat where any source has messages
    tokenizer: PreTrainedTokenizerBase
    columns: frozenset[str]  # those that rewards see in any row
    longest: int  # tokens of the longest item, held-out ones too
    evaluation: HeldOut | None = None

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def take(self, step: int, count: int, round: int = 0) -> list[Any]:
        """Items step·count … of the round's endless order; a pure function of its arguments."""
        spots = self.rounds.take(step, count, round)
        found: dict[int, Any] = {}
        for source, table in enumerate(self.tables):
            slots = [at for at, spot in enumerate(spots) if spot[0] == source]
            records = table.rows([spots[at][1] for at in slots]) if slots else []
            found.update((at, self._item(record)) for at, record in zip(slots, records, strict=True))
        return [found[at] for at in range(count)]

    def held_out_questions(self) -> Sequence[EvalQuestion]:
        """The first held-out rows in file order, as many as are used; empty if there are no prompts."""
        return self._questions

    def held_out_items(self) -> Sequence[Any]:
        """The first held-out pairs or judged answers, as many as are used; empty for the other kinds."""
        return self._held_out_items

    @cached_property
    def _questions(self) -> tuple[EvalQuestion, ...]:
        make = QUESTIONS.get(self.kind)
        return tuple(make(record, self.tokenizer) for record in self._held_out()) if make else ()

    @cached_property
    def _held_out_items(self) -> tuple[Any, ...]:
        return () if self.kind in QUESTIONS else tuple(map(self._item, self._held_out()))

    def _item(self, record: Record) -> Any:
        return ITEMS[self.kind](record, self.tokenizer)

    def _held_out(self) -> list[Record]:
        return self.evaluation.records() if self.evaluation else []


def no_data(config: object, **parts: Any) -> None:
    """Nothing to build for data=none."""
