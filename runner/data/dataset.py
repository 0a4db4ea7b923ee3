"""Tokenised tables and an order over them: the data of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from runner.data.items import item, question
from runner.data.order import Order, take
from runner.data.store import Table
from runner.protocols import Item, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows and how many of them are used."""

    table: Table
    most: int | None  # None = all

    def __len__(self) -> int:
        return min(len(self.table), self.most or len(self.table))


@dataclass(frozen=True)
class TokenisedData:
    """Items of one or several tables in a seeded order, and held-out questions."""

    tables: Sequence[Table]
    order: Order
    fingerprint: str
    tokenizer: PreTrainedTokenizerBase
    evaluation: HeldOut | None = None

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def take(self, step: int, count: int) -> list[Item]:
        """Items step·count … of the endless order; a pure function of its arguments."""
        spots = take(self.order, step, count)
        found: dict[int, Item] = {}
        for source, table in enumerate(self.tables):
            slots = [at for at, spot in enumerate(spots) if spot[0] == source]
            rows = table.rows([spots[at][1] for at in slots])
            found.update((at, item(ids, learnt)) for at, (ids, learnt, _) in zip(slots, rows, strict=True))
        return [found[at] for at in range(count)]

    def held_out(self) -> Sequence[Question]:
        """The first held-out rows in the order of their file, as many as are used; empty if nothing was held out."""
        return self._questions

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        if self.evaluation is None:
            return ()
        rows = self.evaluation.table.rows(range(len(self.evaluation)))
        return tuple(question(self.tokenizer, *row) for row in rows)
