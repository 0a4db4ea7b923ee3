"""Tokenised tables and an order over them: the data of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runner.data.items import ITEMS, QUESTIONS
from runner.data.order import Rounds
from runner.data.store import Record, Table
from runner.interfaces import Question
from runner.run_dir.resume_compatibility import PromptStyle
from runner.spec.base import ItemKind

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
    """Items of one or several tables in a seeded order, and what is held out."""

    kind: ItemKind
    tables: Sequence[Table]
    rounds: Rounds
    fingerprint: str
    style: PromptStyle  # chat where any source has messages
    tokenizer: PreTrainedTokenizerBase
    columns: frozenset[str]  # those that rewards see in any row
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

    def held_out(self) -> Sequence[Question]:
        """The first held-out rows in the order of their file, as many as are used; empty if none can be asked."""
        return self._questions

    def held_out_items(self) -> Sequence[Any]:
        """The first held-out pairs or judged answers, as many as are used; empty for the other kinds."""
        return self._held_out_items

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        make = QUESTIONS.get(self.kind)
        return tuple(make(record, self.tokenizer) for record in self._held_out()) if make else ()

    @cached_property
    def _held_out_items(self) -> tuple[Any, ...]:
        return () if self.kind in QUESTIONS else tuple(map(self._item, self._held_out()))

    def _item(self, record: Record) -> Any:
        return ITEMS[self.kind](record, self.tokenizer)

    def _held_out(self) -> list[Record]:
        return self.evaluation.table.rows(range(len(self.evaluation))) if self.evaluation else []
