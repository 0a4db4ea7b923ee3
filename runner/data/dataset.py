"""The data of a job: tables of records, an order over them, and what the trainer sees of a record.

sft      ids, learnt        ─▶ Item     (held out: Question)
pairs    prompt, 2 answers  ─▶ Pair     judged   prompt, answer ─▶ Judged
prompts  prompt             ─▶ Prompt   (held out, with the answer: Question)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runner.data.order import Rounds
from runner.data.store import Record, Table
from runner.identity import PromptStyle
from runner.protocols import Item, Judged, Pair, Prompt, Question
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Make = Callable[[Record, "PreTrainedTokenizerBase"], Any]


def item(record: Record, tokenizer: PreTrainedTokenizerBase) -> Item:
    """The item of a tokenised row: weight 1 where it is learnt, 0 where it is context."""
    return Item(tuple(record["ids"]), tuple(map(float, record["learnt"])))


def pair(record: Record, tokenizer: PreTrainedTokenizerBase) -> Pair:
    """Two answers to one prompt."""
    chosen, rejected = map(tuple, record["answers"])
    return Pair(tuple(record["prompt"]), chosen, rejected, json.loads(record["facts"])["margin"])


def judged(record: Record, tokenizer: PreTrainedTokenizerBase) -> Judged:
    """One answer, and whether it is a good one."""
    return Judged(tuple(record["prompt"]), tuple(record["answers"][0]), json.loads(record["facts"])["good"])


def prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A prompt; its text is what the ids decode to, also where they were cut."""
    facts, ids = json.loads(record["facts"]), record["prompt"]
    messages = facts["messages"]
    return Prompt(tuple(ids), str(tokenizer.decode(ids)), messages and tuple(messages), facts["columns"])


def question(record: Record, tokenizer: PreTrainedTokenizerBase) -> Question:
    """What to ask and what to expect: all before the last assistant turn, and what a perfect answer decodes to.

    Plain text, and a turn that was cut, have no span: then only the item is there, of which the loss can be measured.
    """
    ids, first, last = record["ids"], record["first"], record["last"]
    whole = item(record, tokenizer)
    return _question(tokenizer, whole, ids[:first], ids[first:last]) if last else Question(whole)


def asked(record: Record, tokenizer: PreTrainedTokenizerBase) -> Question:
    """A held-out prompt with its answer, of which the loss can be measured too."""
    facts, prompt, [answer] = json.loads(record["facts"]), record["prompt"], record["answers"]
    whole = Item((*prompt, *answer), (0.0,) * len(prompt) + (1.0,) * len(answer))
    messages = facts["messages"] and tuple(facts["messages"])
    return replace(_question(tokenizer, whole, prompt, answer), messages=messages, columns=facts["columns"])


def _question(
    tokenizer: PreTrainedTokenizerBase, whole: Item, prompt: Sequence[int], answer: Sequence[int]
) -> Question:
    return Question(
        item=whole,
        prompt_ids=tuple(prompt),
        prompt=str(tokenizer.decode(list(prompt))),
        answer=str(tokenizer.decode(list(answer), skip_special_tokens=True)),
    )


ITEMS: Mapping[ItemKind, Make] = {"sft": item, "pairs": pair, "judged": judged, "prompts": prompt}
QUESTIONS: Mapping[ItemKind, Make] = {"sft": question, "prompts": asked}  # of the others, held-out items are kept


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
