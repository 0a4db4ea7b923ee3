"""data=demo: conversations made on this machine (`demo_tasks`); held-out questions never occur in training.

seed ──numbers──▶ distinct questions ──▶ held-out first, then training ──▶ chat template ──▶ items
                                                                └─ of the kind that the algorithm learns from

    sft      question, right way to the answer   pairs    question, right answer, wrong answer
    prompts  question, column `answer`           judged   question, right or wrong answer in turn
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.data.branches import Answered, encode
from runner.data.config import DemoConfig
from runner.data.demo_tasks import Sort, numbers, task
from runner.data.examples import Answers, Ask, Chat, Example, Reading, held_out_reading
from runner.data.fingerprint import digest, tokenizer_digest
from runner.data.items import ITEMS, QUESTIONS
from runner.data.messages import Message
from runner.data.order import BySize, Rounds
from runner.data.overlong import Limit, Tally
from runner.data.rows import Place, Problems
from runner.data.tokenise import Encoded, Tokeniser
from runner.identity import PromptStyle
from runner.protocols import Decide, Question
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DemoData:
    """Generated items in a seeded order, each tokenised when it is first asked for, so that a run starts at once."""

    style: PromptStyle = "chat"
    columns = ("answer",)

    def __init__(self, config: DemoConfig, tokeniser: Tokeniser, seed: int, kind: ItemKind) -> None:
        self.config, self.tokeniser, self.kind, self.seed = config, tokeniser, kind, seed
        self.fingerprint = digest(config.model_dump(), kind, seed, tokenizer_digest(tokeniser.tokenizer))
        self._task = task(config)
        self._numbers = numbers(self._task.space, config.held_out + config.items, seed)
        self._rounds = Rounds(lambda seed, shuffle: BySize([config.items], seed, shuffle), seed, config.shuffle)
        self._known: dict[int, Encoded | Answered] = {}
        self._check()

    def __len__(self) -> int:
        return self.config.items

    def take(self, step: int, count: int, round: int = 0) -> list[Any]:
        """Items step·count … of the round's endless order; a pure function of its arguments."""
        return self._items([self.config.held_out + index for _, index in self._rounds.take(step, count, round)])

    def held_out(self) -> Sequence[Question]:
        """Everything held out as a question, whatever the kind: so each policy can be asked."""
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
        """A token is a byte at least, and the template adds most to the longest conversation: if the bytes of that one
        fit, all items do; else all are measured. Raises DataError for items above data.max_length."""
        longest = max(range(len(self._numbers)), key=self._characters)
        row = self._rows([longest])[0]
        ids = row.ids if isinstance(row, Encoded) else row.prompt + max(row.answers, key=len, default=[])
        if len(str(self.tokeniser.tokenizer.decode(ids)).encode()) > self.config.max_length:
            problems, tally = Problems("data", "demo"), Tally()
            limit = Limit(self.config.max_length, "error", self.kind)
            for row in self._rows(range(len(self._numbers))):
                list(limit.apply(row, tally, problems))
            problems.raise_if_any()

    def _characters(self, index: int) -> int:
        """Of everything that is said."""
        return sum(len(turn["content"]) for turn in self._conversation(index))

    def _conversation(self, index: int) -> tuple[Message, ...]:
        number, at_once = self._numbers[index], (index + self.seed) % 2 == 1
        asked: Message = {"role": "user", "content": self._task.question(number)}
        return (asked, *self._task.turns(number, at_once))

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
        asked, right = self._conversation(index)[0], self._task.answer(number)
        if reading == "sft":
            return Chat(place, self._conversation(index))
        if reading == "prompts":
            return Ask(place, (asked,), columns={"answer": right})
        if reading == "questions":
            return Answers(place, (_reply(place, asked, right),), {"messages": [asked], "columns": {"answer": right}})
        assert isinstance(self._task, Sort)  # the config's problems() see to it
        good, bad = (_reply(place, asked, said) for said in (right, self._task.wrong(number, self.seed)))
        if reading == "pairs":
            return Answers(place, (good, bad), {"margin": None})
        is_good = (index + self.seed) % 2 == 0
        return Answers(place, (good if is_good else bad,), {"good": is_good})


def _reply(place: Place, asked: Message, said: str) -> Chat:
    """The question, which is given, and an answer to it."""
    return Chat(place, (asked, {"role": "assistant", "content": said}), context=1)


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
