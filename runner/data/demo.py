"""data=demo: conversations made on this machine, "sort 5031" → "0135"; held-out numbers never occur in training.

seed ──numbers──▶ distinct strings of digits ──▶ held-out first, then training ──▶ chat template ──▶ items
                                                                     └─ of the kind that the algorithm learns from

    sft      question, right answer              pairs    question, right answer, wrong answer
    prompts  question, column `answer`           judged   question, right or wrong answer in turn
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.data.branches import Answered, encode
from runner.data.config import DemoConfig
from runner.data.examples import Answers, Ask, Chat, Example, Reading, held_out_reading
from runner.data.fingerprint import digest, tokenizer_digest
from runner.data.items import ITEMS, QUESTIONS
from runner.data.messages import Message
from runner.data.order import BySize, Rounds, permutation, stream
from runner.data.overlong import Limit, Tally
from runner.data.rows import Place, Problems
from runner.data.tokenise import Encoded, Tokeniser
from runner.identity import PromptStyle
from runner.protocols import Decide, Question
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = 10**6  # so many numbers are permuted; of more, some are drawn


class DemoData:
    """Generated items in a seeded order, each tokenised when it is first asked for, so that a run starts at once."""

    style: PromptStyle = "chat"

    def __init__(self, config: DemoConfig, tokeniser: Tokeniser, seed: int, kind: ItemKind) -> None:
        self.config, self.tokeniser, self.kind, self.seed = config, tokeniser, kind, seed
        self.fingerprint = digest(config.model_dump(), kind, seed, tokenizer_digest(tokeniser.tokenizer))
        self._numbers = numbers(config.digits, config.held_out + config.items, seed)
        self._rounds = Rounds(lambda seed, shuffle: BySize([config.items], seed, shuffle), seed, config.shuffle)
        self._known: dict[int, Encoded | Answered] = {}
        self._check()

    def __len__(self) -> int:
        return self.config.items

    def take(self, step: int, count: int, round: int = 0) -> list[Any]:
        """Items step·count … of the round's endless order; a pure function of its arguments."""
        return self._items([self.config.held_out + index for _, index in self._rounds.take(step, count, round)])

    def held_out(self) -> Sequence[Question]:
        """Every held-out number as a question, whatever the kind: so each policy can be asked."""
        return self._questions

    def held_out_items(self) -> Sequence[Any]:
        """Every held-out pair or judged answer; empty for the other kinds."""
        return () if self.kind in QUESTIONS else self._items(range(self.config.held_out))

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        kind: ItemKind = "sft" if self.kind == "sft" else "prompts"
        rows = self._encode(range(self.config.held_out), held_out_reading(kind))
        return tuple(QUESTIONS[kind](row.record(), self.tokeniser.tokenizer) for row in rows)

    def _items(self, indices: Sequence[int]) -> list[Any]:
        make = ITEMS[self.kind]
        return [make(row.record(), self.tokeniser.tokenizer) for row in self._rows(indices)]

    def _check(self) -> None:
        """Every number makes a conversation of as many bytes, and a token is a byte at least: if the bytes of one
        fit, all items do; else all are measured. Raises DataError for items above data.max_length."""
        first = self._rows([0])[0]
        ids = first.ids if isinstance(first, Encoded) else first.prompt + max(first.answers, key=len, default=[])
        if len(str(self.tokeniser.tokenizer.decode(ids)).encode()) > self.config.max_length:
            problems, tally = Problems("data", "demo"), Tally()
            limit = Limit(self.config.max_length, "error", self.kind)
            for row in self._rows(range(len(self._numbers))):
                list(limit.apply(row, tally, problems))
            problems.raise_if_any()

    def _rows(self, indices: Sequence[int]) -> list[Encoded | Answered]:
        new = [index for index in dict.fromkeys(indices) if index not in self._known]
        self._known.update(zip(new, self._encode(new, self.kind), strict=True))
        return [self._known[index] for index in indices]

    def _encode(self, indices: Sequence[int], reading: Reading) -> list[Encoded | Answered]:
        problems = Problems("data", "demo")
        rows = encode(self.tokeniser, [self._example(index, reading) for index in indices], problems)
        problems.raise_if_any()
        return rows

    def _example(self, index: int, reading: Reading) -> Example:
        place, number = Place("demo", index + 1, "item"), self._numbers[index]
        if reading == "sft":
            return conversation(number, answer(number), place)
        if reading == "prompts":
            return Ask(place, (_asked(number),), columns={"answer": answer(number)})
        right, other = (_reply(number, said, place) for said in (answer(number), wrong(number, self.seed)))
        if reading == "questions":
            return Answers(place, (right,))
        if reading == "pairs":
            return Answers(place, (right, other), {"margin": None})
        good = (index + self.seed) % 2 == 0
        return Answers(place, (right if good else other,), {"good": good})


def answer(number: str) -> str:
    """The digits in order."""
    return "".join(sorted(number))


def wrong(number: str, seed: int) -> str:
    """The digits in a seeded order that is not the right one; where all are equal, the last one is changed."""
    right = answer(number)
    mixed = "".join(right[i] for i in permutation(len(right), seed, "demo", "wrong", number))
    turned = [mixed[i:] + mixed[:i] for i in range(len(mixed))]
    other = next((digits for digits in turned if digits != right), None)
    return other or right[:-1] + str((int(right[-1]) + 1) % 10)


def conversation(number: str, said: str, place: Place) -> Chat:
    """The question and an answer to it."""
    return Chat(place, (_asked(number), {"role": "assistant", "content": said}))


def _reply(number: str, said: str, place: Place) -> Chat:
    return replace(conversation(number, said, place), context=1)


def _asked(number: str) -> Message:
    return {"role": "user", "content": f"sort {number}"}


def numbers(digits: int, count: int, seed: int) -> list[str]:
    """`count` distinct strings of `digits` digits in seeded order; `count` is at most 10**digits."""
    space = 10**digits
    if space <= max(SMALL, 8 * count):
        drawn: Iterable[int] = permutation(space, seed, "demo").tolist()
    else:  # repeats are rare in so large a space: twice the count is drawn and the first of each number taken
        raw = stream(seed, "demo").random_raw(2 * count + 64)
        drawn = dict.fromkeys((raw % np.uint64(space)).tolist())
    return [str(number).zfill(digits) for number in islice(drawn, count)]


def build(
    config: DemoConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    decide: Decide,
    cache_dir: Path,
    kind: ItemKind,
) -> DemoData:
    """The demo's data; `cache_dir` is not used, as generating is faster than reading.

    Raises DataError where the tokenizer has no chat template or items are too long.
    """
    data = DemoData(config, Tokeniser(tokenizer, "assistant" if kind == "sft" else "completion"), seed, kind)
    for note in sorted(data.tokeniser.notes):
        decide("data.end_token", "learnt", "not learnt", f"data=demo: {note}")
    return data
