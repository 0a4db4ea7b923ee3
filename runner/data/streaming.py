"""data.streaming=true: rows are read and tokenized as steps need them, and not stored.

    position ──▶ block = position ÷ B and place in it ──permutation(seed, block)──▶ item        B = data.shuffle_buffer
    block k  =  the items of rows k·B … k·B + B − 1 of the source, which begins again at its end

So an item is a function of its position, and a resumed run reads, without tokenizing, up to the block it needs. A block
with fewer items than rows, because some are left out, repeats some of its items. One with more, because branches of a
conversation are above max_length together, leaves some out (with data.shuffle others in each pass) and says how many.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.core.errors import DataError
from runner.data.dataset import Record, TokenizedData
from runner.data.examples import held_out_reading
from runner.data.formats import FormatCheck
from runner.data.parallel_tokenization import BatchTokenizer, TokenizedBatch
from runner.data.prepare import Portion, RowSource, SourcePreparation, order_of_tables, refuse_unseen, summarize
from runner.data.readers import Problems, Row
from runner.data.sampling_order import permutation
from runner.data.tokenization import digest

log = logging.getLogger("runner")
SHUFFLE_BUFFER = 1000  # rows, where data.shuffle_buffer is null


class RowBlocks:
    """The blocks of an endless stream of rows, of which the newest is kept."""

    def __init__(self, prepare: SourcePreparation, portion: Portion, size: int) -> None:
        """size: rows of a block."""
        self._portion, self._size = portion, size
        self._problems = Problems(portion.source.key, portion.source.name)
        self.check = FormatCheck(self._problems, portion.reading, prepare.config.rename_columns)
        self.limit = prepare.limit(portion.reading)
        self._tokenizer = BatchTokenizer(prepare.options(portion))
        self._rows, self._next = self._endless_rows(), 0
        self._newest: tuple[int, list[Record]] = (-1, [])

    def items(self, number: int) -> list[Record]:
        """The items of a block. Raises DataError where a row is faulty or nothing is left of all."""
        if number != self._newest[0]:
            if number < self._next:
                self._rows, self._next = self._endless_rows(), 0
            skipped = (number - self._next) * self._size
            rows = list(islice(self._rows, skipped, skipped + self._size))
            identical = self.check.num_identical_pairs
            batch = self.tokenize(rows)
            identical = self.check.num_identical_pairs - identical
            where = f"{self._portion.where}, block {number}"
            if number and (text := self.limit.report(batch.counts)):
                log.info("%s: %s", where, text)
            if number and identical:
                log.info("%s: pairs left out, as chosen and rejected are the same: %d", where, identical)
            if (beyond := batch.items.num_rows - self._size) > 0:
                log.warning(
                    "%s: its %d rows became %d items, one for each branch of a conversation above the limit; %d "
                    "are left out; to train on all, raise data.max_length or type data.streaming=false",
                    *(where, self._size, batch.items.num_rows, beyond),
                )
            self._next, self._newest = number + 1, (number, batch.items.to_pylist())
        return self._newest[1]

    def tokenize(self, rows: Sequence[Row]) -> TokenizedBatch:
        """The items of some rows, checked. Raises DataError where a row is faulty or nothing is left of all."""
        problems = self._problems
        batch = self._tokenizer.tokenize(list(self.check.examples(rows)))
        problems.extend(batch.problems)
        if hint := self.limit.way_out(batch.counts):
            problems.add_hint(hint)
        problems.raise_if_any()
        if not batch.items.num_rows:
            place = f", {rows[0].place} to {rows[-1].place}" if rows else ""
            raise DataError(
                f"{self._portion.where}{place}: no item is left; {self.limit.report(batch.counts) or 'no row'}"
            )
        return batch

    def _endless_rows(self) -> Iterator[Row]:
        while True:
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

    def take(self, step: int, count: int, round: int = 0) -> list[Any]:
        """Items step·count … of the stream; a pure function of its arguments."""
        assert not round  # the config's problems() refuse what draws more
        return [self._item(self._record(position)) for position in range(step * count, (step + 1) * count)]

    def _record(self, position: int) -> Record:
        assert self.blocks is not None
        block, place = divmod(position, self.size)
        items = self.blocks.items(block)
        place %= len(items)
        order = _block_order(len(items), self.seed, block) if self.shuffle else None
        return items[place if order is None else int(order[place])]


@lru_cache(maxsize=2)
def _block_order(size: int, seed: int, block: int) -> NDArray[np.int64]:
    return permutation(size, seed, block, "stream")


def build_stream(prepare: SourcePreparation, source: RowSource, held_out: RowSource | None, seed: int) -> StreamedData:
    """The data of a source that is read while steps are made; its first block is read now.

    Raises DataError, also for a length that neither the model nor data.max_length limits.
    """
    config, kind = prepare.config, prepare.kind
    portion, size = Portion(source, kind), config.shuffle_buffer or SHUFFLE_BUFFER
    blocks = RowBlocks(prepare, portion, size)
    if blocks.limit.most == sys.maxsize:
        raise DataError("data.streaming=true: the model sets no limit to a row's length; type data.max_length=N")
    first = blocks.tokenize(list(islice(source.rows(blocks.check.problems), size)))
    summary = summarize(blocks.check, blocks.limit, first.counts)
    summary |= {"notes": sorted(first.notes), "chat_notes": sorted(first.chat_notes)}
    prepare.report_source(portion, summary, f"the first {first.counts.rows} rows of {portion.where}")
    text = f"{size} rows are shuffled together" if config.shuffle else "rows stay in their order"
    prepare.decide("data.streaming", text, text, "rows are read and checked as steps need them (data.shuffle_buffer)")
    tables, evaluation = [], None
    if held_out is not None:
        asked = Portion(held_out, held_out_reading(kind))
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
