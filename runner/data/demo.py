"""data=demo: conversations generated on this machine: numbered questions with right answers.

    sort   "sort 5031"       ──────────────────────────────────────────────────────▶ "0135"
    vault  "vault 0371"      ──▶ find_key() ──▶ a key ──▶ unlock() ──▶ open ──▶ "open"
                             ──▶ unlock() ──▶ error: no key ──▶ "shut"       in every other conversation
    sum    "sum 5031 4927"   ──▶ "calc 5031+4927" ──▶ the tool says "9958" ──▶ "9958"
                             ──────────────────────────────────────────────▶ "9958"    in every other conversation

    shapes an image, "which shapes?" ───────────────────────────────────────────────▶ "2 circles"

A small model sorts in its head, but does not add in its head: having trained on these conversations it calls the tool
half of the time and guesses otherwise, and a reward for right answers can teach to call the tool.

Held-out questions never occur in training.

seed ──numbers──▶ distinct questions ──▶ held-out first, then training ──▶ chat template ──▶ items
                                                                └─ of the kind that the algorithm learns from

    sft      question, right way to the answer   pairs    question, right answer, wrong answer
    prompts  question, column `answer`           judged   question, right or wrong answer in turn
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.core.media import without_media
from runner.data import demo_shapes
from runner.data.config import ChatConfig, DemoConfig
from runner.data.examples import AnswersExample, ChatExample, Example, PromptExample, Reading, held_out_reading
from runner.data.items import (
    ANSWERS,
    QUESTIONS,
    LengthLimit,
    TruncationCounts,
    rollout_prompt,
    tokenized_example,
)
from runner.data.message_keys import Message
from runner.data.readers import Problems, SourceLocation
from runner.data.sampling_order import ProportionalOrder, RefillOrders, permutation, random_stream
from runner.data.tokenization import (
    EncodedAnswers,
    EncodedExample,
    EncodedRows,
    ExampleTokenizer,
    digest,
    share_prefix,
    tokenizer_digest,
)
from runner.interfaces import Decide, EvalQuestion
from runner.run_dir.manifest import PromptStyle
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = 10**6  # so many numbers are permuted; of more, some are drawn


@dataclass(frozen=True, slots=True)
class DemoTask(ABC):
    """Questions 0 … `config.num_questions` − 1, all different."""

    config: DemoConfig

    @abstractmethod
    def question(self, number: int) -> str:
        """What the user says."""

    def message_content(self, number: int) -> Any:
        """The content of the user's message: the question, or parts of it."""
        return self.question(number)

    @abstractmethod
    def answer(self, number: int) -> str:
        """What a right final answer says."""

    def turns(self, number: int, at_once: bool) -> tuple[Message, ...]:
        """From the question to the answer; without a tool it is given at once in any case."""
        return ({"role": "assistant", "content": self.answer(number)},)


class SortTask(DemoTask):
    """Sort the digits of a number."""

    def question(self, number: int) -> str:
        """The number with its leading zeros."""
        return f"sort {self._zero_padded(number)}"

    def answer(self, number: int) -> str:
        """The digits in order."""
        return "".join(sorted(self._zero_padded(number)))

    def wrong(self, number: int, seed: int) -> str:
        """The digits in another seeded order; where all digits are equal, the last one is changed."""
        right = self.answer(number)
        mixed = "".join(right[i] for i in permutation(len(right), seed, "demo", "wrong", self._zero_padded(number)))
        turned = [mixed[i:] + mixed[:i] for i in range(len(mixed))]
        other = next((digits for digits in turned if digits != right), None)
        return other or right[:-1] + str((int(right[-1]) + 1) % 10)

    def _zero_padded(self, number: int) -> str:
        return str(number).zfill(self.config.digits)


class SumTask(DemoTask):
    """Add numbers of `digits` digits, without leading 0, with the calculator of environment=calculator."""

    def question(self, number: int) -> str:
        """The numbers, a blank between them."""
        return f"sum {' '.join(map(str, self._terms(number)))}"

    def answer(self, number: int) -> str:
        """Their sum."""
        return str(sum(self._terms(number)))

    def turns(self, number: int, at_once: bool) -> tuple[Message, ...]:
        """The answer; if not at once, after a call of the calculator, which says the same."""
        answer: Message = {"role": "assistant", "content": self.answer(number)}
        call: Message = {"role": "assistant", "content": f"calc {'+'.join(map(str, self._terms(number)))}"}
        return (answer,) if at_once else (call, {"role": "tool", "content": self.answer(number)}, answer)

    def _terms(self, number: int) -> list[int]:
        return decode_numbers(number, self.config.numbers_to_add, self.config.digits)


class VaultTask(DemoTask):
    """Open a vault by two tools, of which unlock() needs that find_key() was called before."""

    def question(self, number: int) -> str:
        """The number of the vault."""
        return f"vault {str(number).zfill(self.config.digits)}"

    def answer(self, number: int) -> str:
        """What is said of an open vault."""
        return "open"

    def turns(self, number: int, at_once: bool) -> tuple[Message, ...]:
        """Both calls and the answer; if at once, unlock() alone, which fails."""
        if at_once:
            return (*_call("unlock", "error: no key"), {"role": "assistant", "content": "shut"})
        answer: Message = {"role": "assistant", "content": self.answer(number)}
        return (*_call("find_key", "a key"), *_call("unlock", "open"), answer)


def _call(name: str, result: str) -> tuple[Message, Message]:
    """A call without arguments, and what the tool says."""
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}


class WordedTask(DemoTask):
    """A question in plain words, for any model: arithmetic, reverse or format."""

    def question(self, number: int) -> str:
        """The question, with how to answer it."""
        if self.config.task == "arithmetic":
            a, sign, b = self._operation(number)
            return f"What is {a} {sign} {b}? Answer with the number alone."
        if self.config.task == "reverse":
            return f'Spell the word "{self._word(number)}" backwards. Answer with the word alone.'
        return f"Write the number {number:0{self.config.digits}d} between <answer> and </answer>. Write nothing else."

    def answer(self, number: int) -> str:
        """The expected answer."""
        if self.config.task == "arithmetic":
            a, sign, b = self._operation(number)
            return str({"+": a + b, "-": a - b, "*": a * b}[sign])
        if self.config.task == "reverse":
            return self._word(number)[::-1]
        return f"<answer>{number:0{self.config.digits}d}</answer>"

    def _operation(self, number: int) -> tuple[int, str, int]:
        pair, sign = divmod(number, 3)
        b, a = decode_numbers(pair, 2, self.config.digits)
        return a, "+-*"[sign], b

    def _word(self, number: int) -> str:
        """The digits of `number` to the base 26, as letters."""
        return "".join(chr(ord("a") + number // 26**at % 26) for at in range(self.config.digits))


class ShapesTask(DemoTask):
    """Count and name the shapes of an image; the answer is in the pixels alone."""

    def question(self, number: int) -> str:
        """The same for all images."""
        return "which shapes?"

    def message_content(self, number: int) -> Any:
        """The image, and the question."""
        image = {"type": "image", "image": demo_shapes.draw(number)}
        return [image, {"type": "text", "text": self.question(number)}]

    def answer(self, number: int) -> str:
        """Number and name of the shapes."""
        return demo_shapes.answer(number)

    def wrong(self, number: int, seed: int) -> str:
        """What another image shows."""
        return demo_shapes.answer(number + 1 + seed % (demo_shapes.NUM_ANSWERS - 1))


def decode_numbers(number: int, count: int, digits: int) -> list[int]:
    """The first `count` digits of `number` to a base such that each is a number of `digits` digits."""
    base = 9 * 10 ** (digits - 1)
    return [10 ** (digits - 1) + number // base**at % base for at in range(count)]


TASKS: dict[str, type[DemoTask]] = {"sort": SortTask, "sum": SumTask, "vault": VaultTask, "shapes": ShapesTask}


def draw_numbers(space: int, count: int, seed: int) -> list[int]:
    """`count` distinct numbers below `space` in seeded order; `count` ≤ `space` < 2**63."""
    if space <= max(SMALL, 8 * count):
        drawn: Iterable[int] = permutation(space, seed, "demo").tolist()
    else:  # repeats are rare in so large a space: twice the count is drawn and the first of each number taken
        raw = random_stream(seed, "demo").random_raw(2 * count + 64)
        drawn = dict.fromkeys((raw % np.uint64(space)).tolist())
    return list(islice(drawn, count))


class DemoData:
    """Generated items in a seeded order, each tokenized on first use, so that a run starts at once."""

    prompt_style: PromptStyle = "chat"
    columns = ("answer",)

    def __init__(
        self, config: DemoConfig, tokenizer: ExampleTokenizer, seed: int, kind: ItemKind, limit: LengthLimit
    ) -> None:
        self.config, self.tokenizer, self.kind, self.seed = config, tokenizer, kind, seed
        chat = tokenizer.chat.model_dump(mode="json", exclude={"template"})
        self.fingerprint = digest(config.model_dump(), kind, seed, chat, tokenizer_digest(tokenizer.tokenizer))
        self._task = TASKS.get(config.task, WordedTask)(config)
        self._numbers = draw_numbers(config.num_questions, config.held_out + config.items, seed)
        self._rounds = RefillOrders(
            lambda seed, shuffle: ProportionalOrder([config.items], seed, shuffle), seed, config.shuffle
        )
        self._known: dict[int, EncodedExample | EncodedAnswers] = {}
        self.longest = self._longest(limit)

    def __len__(self) -> int:
        return self.config.items

    def take(self, step: int, count: int, round: int = 0) -> list[Any]:
        """Items step·count … of the round's endless order; a pure function of its arguments."""
        return self._items((self.config.held_out + self._rounds.take(step, count, round)[:, 1]).tolist())

    def held_out_questions(self) -> Sequence[EvalQuestion]:
        """All held-out rows as questions, whatever the kind, for every policy."""
        kind: ItemKind = "sft" if self.kind == "sft" else "prompts"
        rows = self._encode(range(self.config.held_out), held_out_reading(kind))
        return tuple(QUESTIONS[kind](row.record(), self.tokenizer.tokenizer) for row in rows)

    def held_out_items(self) -> Sequence[Any]:
        """Every held-out pair or judged answer; empty for the other kinds."""
        return () if self.kind in QUESTIONS else self._items(range(self.config.held_out))

    def _items(self, indices: Sequence[int]) -> list[Any]:
        return list(map(self._item, self._rows(indices)))

    def _item(self, row: EncodedExample | EncodedAnswers) -> Any:
        if isinstance(row, EncodedExample):
            return tokenized_example(row.record())
        if self.kind == "prompts":
            return rollout_prompt(row.prompt, row.facts, self.tokenizer.tokenizer)
        make, label, _ = ANSWERS[self.kind]
        return make(tuple(row.prompt), *map(tuple, row.answers), row.facts[label])

    def _longest(self, limit: LengthLimit) -> int:
        """No item has more tokens. Raises DataError for items above the limit.

        A token is a byte at least, and the template adds most to the longest conversation: if the bytes of that one
        fit, all items do; else all are measured.
        """
        longest = max(range(len(self._numbers)), key=self._characters)
        row = self._rows([longest])[0]
        ids = row.ids if isinstance(row, EncodedExample) else row.prompt + max(row.answers, key=len, default=[])
        text = without_media(ids)
        if (most := len(str(self.tokenizer.tokenizer.decode(text)).encode()) + len(ids) - len(text)) > limit.most:
            problems, tally = Problems("data", "demo"), TruncationCounts()
            for row in self._rows(range(len(self._numbers))):
                list(limit.apply(row, tally, problems))
            problems.raise_if_any()
            return tally.longest_item
        return most

    def _characters(self, index: int) -> int:
        """Of everything that is said."""
        number = self._numbers[index]
        return len(self._task.question(number)) + sum(len(turn["content"]) for turn in self._task.turns(number, False))

    def _conversation(self, index: int) -> tuple[Message, ...]:
        number, at_once = self._numbers[index], (index + self.seed) % 2 == 1
        asked: Message = {"role": "user", "content": self._task.message_content(number)}
        return (asked, *self._task.turns(number, at_once))

    def _rows(self, indices: Sequence[int]) -> list[EncodedExample | EncodedAnswers]:
        new = [index for index in dict.fromkeys(indices) if index not in self._known]
        self._known.update(zip(new, self._encode(new, self.kind), strict=True))
        return [self._known[index] for index in indices]

    def _encode(self, indices: Sequence[int], reading: Reading) -> list[EncodedExample | EncodedAnswers]:
        problems = Problems("data", "demo")
        rows = self.tokenizer.encode([self._example(index, reading) for index in indices], problems)
        problems.raise_if_any()
        return [share_prefix(row.rows) or row.rows[-1] if isinstance(row, EncodedRows) else row for row in rows]

    def _example(self, index: int, reading: Reading) -> Example:
        place, number = SourceLocation("demo", index + 1, "item"), self._numbers[index]
        asked, right = self._conversation(index)[0], self._task.answer(number)
        if reading == "sft":
            return ChatExample(place, self._conversation(index))
        if reading == "prompts":
            return PromptExample(place, (asked,), columns={"answer": right})
        if reading == "questions":
            return AnswersExample(
                place,
                (_question_with_answer(place, asked, right),),
                {"messages": [asked], "columns": {"answer": right}},
            )
        assert isinstance(self._task, SortTask | ShapesTask)  # the config's problems() see to it
        good, bad = (_question_with_answer(place, asked, said) for said in (right, self._task.wrong(number, self.seed)))
        if reading == "pairs":
            return AnswersExample(place, (good, bad), {"margin": None})
        is_good = (index + self.seed) % 2 == 0
        return AnswersExample(place, (good if is_good else bad,), {"good": is_good})


def _question_with_answer(place: SourceLocation, asked: Message, said: str) -> ChatExample:
    """The question, which is given, and an answer to it."""
    return ChatExample(place, (asked, {"role": "assistant", "content": said}), context=1)


def build(
    config: DemoConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    decide: Decide,
    cache_dir: Path,
    kind: ItemKind,
    chat: ChatConfig | None = None,
    length_limit: tuple[int, str] | None = None,
) -> DemoData:
    """The demo's data; `cache_dir` is not used, as generating is faster than reading.

    Raises DataError where the tokenizer has no chat template or items are too long.
    """
    examples = ExampleTokenizer(tokenizer, chat, None if kind == "sft" else "completion")
    data = DemoData(config, examples, seed, kind, LengthLimit(config.max_length, "error", kind, length_limit))
    for note in sorted(data.tokenizer.notes):
        decide("data.end_token", "trained on", "not trained on", f"data=demo: {note}")
    return data
