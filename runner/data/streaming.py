"""data.streaming=true: rows are read and tokenized as steps need them, and not stored.

    position ──▶ block = position ÷ B and place in it ──permutation(seed, block)──▶ item        B = data.shuffle_buffer
    block k  =  the items of rows k·B … k·B + B − 1 of the source, which begins again at its end

So an item is a function of its position, and a resumed run reads, without tokenizing, up to the block it needs. A block
with fewer items than rows, because some are left out, repeats some of its items; in place of one without an item, the
next one that has any is used. One with more, because branches of a conversation are above max_length together, leaves
some out (with data.shuffle others in each pass) and says how many.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.core.errors import DataError
from runner.data.dataset import Summary, TokenizedData, TokenizedTable
from runner.data.examples import held_out_reading
from runner.data.formats import FormatCheck
from runner.data.items import TruncationCounts
from runner.data.parallel_tokenization import BatchTokenizer, TokenizedBatch
from runner.data.prepare import (
    DataSplit,
    RowSource,
    SourcePreparation,
    no_item_error,
    order_of_tables,
    refuse_unseen,
    summarize,
)
from runner.data.readers import Problems, Row
from runner.data.sampling_order import permutation
from runner.data.table_rows import rows_of_tables
from runner.data.tokenization import digest

log = logging.getLogger("runner")
SHUFFLE_BUFFER = 1000  # rows, where data.shuffle_buffer is null
BY_ROW = ("ignored", "given", "unread", "notes", "chat_notes")  # of a summary: what any later row may add to


class RowBlocks:
    """The blocks of an endless stream of rows, of which the newest is kept."""

    def __init__(self, prepare: SourcePreparation, portion: DataSplit, size: int) -> None:
        """size: rows of a block."""
        self._prepare, self._portion, self._size = prepare, portion, size
        self._problems = Problems(portion.source.key, portion.source.name)
        self.check = FormatCheck(
            self._problems, portion.reading, prepare.config.rename_columns, media_root=prepare.config.media_root
        )
        self.limit = prepare.limit(portion.reading)
        self._tokenizer = BatchTokenizer(prepare.options(portion))
        self._rows, self._next, self._passes = self._endless_rows(), 0, 0
        self._newest: tuple[range, TokenizedTable | None] = (range(0), None)
        self._reported: dict[str, set[str]] = {name: set() for name in BY_ROW}

    def items(self, number: int) -> TokenizedTable:
        """The items of a block, or of the next one that has any.

        Raises DataError where a row is faulty, or a whole pass over the rows has no item.
        """
        if number not in self._newest[0]:
            if number < self._next:
                self._rows, self._next = self._endless_rows(), 0
            skipped = (number - self._next) * self._size
            next(islice(self._rows, skipped, skipped), None)
            identical = self.check.num_identical_pairs
            batch, blocks = self._read(self._rows)
            self._next, self._newest = number + blocks, (range(number, number + blocks), TokenizedTable(batch.items))
            where = f"block {number}" if blocks == 1 else f"blocks {number} to {self._next - 1}"
            self._report(f"{self._portion.where}, {where}", batch, identical)
        table = self._newest[1]
        assert table is not None
        return table

    def read_first(self) -> Summary:
        """What was found in the first rows, up to a block with an item. Raises DataError as `items` does."""
        batch, _ = self._read(self._portion.source.rows(self._problems))
        summary = self._summary(batch)
        self._prepare.report_source(
            self._portion, summary, f"the first {batch.counts.rows} rows of {self._portion.where}"
        )
        self._new_of(summary)
        return summary

    def _read(self, rows: Iterator[Row]) -> tuple[TokenizedBatch, int]:
        """The first block of some rows that has an item, with the counts of all read ones, and their number."""
        tally, passes = TruncationCounts(), self._passes
        for number in count(1):
            block = list(islice(rows, self._size))
            batch = self._tokenizer.tokenize(list(self.check.examples(block)))
            tally.add(batch.counts)
            self._problems.extend(batch.problems)
            if hint := self.limit.truncation_hint(tally):
                self._problems.add_hint(hint)
            self._problems.raise_if_any()
            if batch.items.num_rows:
                return replace(batch, counts=tally), number
            if not block or self._passes > passes + 1:  # a whole pass has ended since
                break
        raise no_item_error(self._portion.source, self.check, self.limit, tally)

    def _summary(self, batch: TokenizedBatch) -> Summary:
        notes = {"notes": sorted(batch.notes), "chat_notes": sorted(batch.chat_notes)}
        return summarize(self.check, self.limit, batch.counts) | notes

    def _new_of(self, summary: Summary) -> Summary:
        """What of a summary no block before had: columns and notes that appear for the first time."""
        new = {name: [one for one in summary[name] if one not in self._reported[name]] for name in BY_ROW}
        for name, values in new.items():
            self._reported[name].update(values)
        return summary | new

    def _report(self, where: str, batch: TokenizedBatch, identical: int) -> None:
        """Log what was left out, and what appears for the first time; block 0 was reported before."""
        self._prepare.report_rows(self._portion.reading, self._new_of(self._summary(batch)), where)
        if self._newest[0][0] and (text := self.limit.report(batch.counts)):
            log.info("%s: %s", where, text)
        if self._newest[0][0] and (pairs := self.check.num_identical_pairs - identical):
            log.info("%s: pairs left out, as chosen and rejected are the same: %d", where, pairs)
        if (beyond := batch.items.num_rows - self._size) > 0:
            log.warning(
                "%s: its %d rows became %d items, one for each branch of a conversation above the limit; %d "
                "are left out; to train on all, raise data.max_length or type data.streaming=false",
                *(where, self._size, batch.items.num_rows, beyond),
            )

    def _endless_rows(self) -> Iterator[Row]:
        while True:
            self._passes += 1
            rows = self._portion.source.rows(self._problems)
            if (first := next(rows, None)) is None:
                return
            yield first
            yield from rows


@dataclass(frozen=True)
class StreamedData(TokenizedData):
    """Items of a stream in a seeded order within blocks, and held-out rows as of any data."""

    blocks: RowBlocks | None = None
    size: int = 1
    seed: int = 0
    shuffle: bool = True

    def __len__(self) -> int:
        """Nobody knows how many items a stream has: as many as there may be."""
        return sys.maxsize

    def take(self, step: int, count: int, round: int = 0) -> Sequence[Any]:
        """Items step·count … of the stream; a pure function of its arguments."""
        assert not round and self.blocks is not None  # the config's problems() refuse what draws more
        blocks, places = np.divmod(np.arange(step * count, (step + 1) * count), self.size)
        tables, spots = list[TokenizedTable](), list[tuple[int, int]]()
        for block in np.unique(blocks).tolist():
            table = self.blocks.items(block)
            rows = places[blocks == block] % len(table)
            if self.shuffle:
                rows = _block_order(len(table), self.seed, block)[rows]
            spots += [(len(tables), row) for row in rows.tolist()]
            tables.append(table)
        return rows_of_tables(self.kind, tables, np.array(spots), self.tokenizer)


@lru_cache(maxsize=2)
def _block_order(size: int, seed: int, block: int) -> NDArray[np.int64]:
    return permutation(size, seed, block, "stream")


def build_stream(prepare: SourcePreparation, source: RowSource, held_out: RowSource | None, seed: int) -> StreamedData:
    """The data of a source that is read while steps are made; its first block is read now.

    Raises DataError, also for a length that neither the model nor data.max_length limits.
    """
    config, kind = prepare.config, prepare.kind
    portion, size = DataSplit(source, kind), config.shuffle_buffer or SHUFFLE_BUFFER
    blocks = RowBlocks(prepare, portion, size)
    if blocks.limit.most == sys.maxsize:
        raise DataError("data.streaming=true: the model sets no limit to a row's length; type data.max_length=N")
    summary = blocks.read_first()
    text = f"{size} rows are shuffled together" if config.shuffle else "rows stay in their order"
    prepare.decide.record_fact(
        "data.streaming", text, "rows are read and checked as steps need them (data.shuffle_buffer)"
    )
    tables, evaluation = [], None
    if held_out is not None:
        asked = DataSplit(held_out, held_out_reading(kind))
        tables = [prepare.table(asked, prepare.key(asked))]
        evaluation = prepare.held_out([table for table, _ in tables])
    refuse_unseen(config, [summary, *(found for _, found in tables)])
    return StreamedData(
        kind=kind,
        tables=(),
        rounds=order_of_tables(config, [1], seed),
        fingerprint=digest(prepare.key(portion), size),
        prompt_style=summary["style"],
        tokenizer=prepare.tokenizer,
        columns=frozenset(summary["given"]),
        longest=blocks.limit.most,
        evaluation=evaluation,
        blocks=blocks,
        size=size,
        seed=seed,
        shuffle=config.shuffle,
    )
