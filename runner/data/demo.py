"""data=demo: conversations made on this machine, "sort 5031" → "0135"; held-out numbers never occur in training.

seed ──numbers──▶ distinct strings of digits ──▶ held-out first, then training ──▶ chat template ──▶ items
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runner.data.config import DemoConfig
from runner.data.fingerprint import digest, tokenizer_digest
from runner.data.formats import Chat
from runner.data.items import item, question
from runner.data.order import BySize, permutation, stream, take
from runner.data.overlong import Limit, Tally
from runner.data.rows import Place, Problems
from runner.data.tokenise import Encoded, Tokeniser
from runner.protocols import Decide, Item, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = 10**6  # so many numbers are permuted; of more, some are drawn


class DemoData:
    """Generated items in a seeded order, each tokenised when it is first asked for, so that a run starts at once."""

    def __init__(self, config: DemoConfig, tokeniser: Tokeniser, seed: int) -> None:
        self.config, self.tokeniser = config, tokeniser
        self.fingerprint = digest(config.model_dump(), seed, tokenizer_digest(tokeniser.tokenizer))
        self._numbers = numbers(config.digits, config.held_out + config.items, seed)
        self._order = BySize([config.items], seed, config.shuffle)
        self._known: dict[int, Encoded] = {}
        self._check()

    def __len__(self) -> int:
        return self.config.items

    def take(self, step: int, count: int) -> list[Item]:
        """Items step·count … of the endless order; a pure function of its arguments."""
        rows = self._rows([self.config.held_out + index for _, index in take(self._order, step, count)])
        return [item(row.ids, row.learnt) for row in rows]

    def held_out(self) -> Sequence[Question]:
        """Every held-out conversation as a question."""
        return self._questions

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        rows = self._rows(range(self.config.held_out))
        return tuple(question(self.tokeniser.tokenizer, row.ids, row.learnt, row.answer) for row in rows)

    def _check(self) -> None:
        """Every number makes a conversation of as many bytes, and a token is a byte at least: if the bytes of one
        fit, all items do; else all are measured. Raises DataError for items above data.max_length."""
        first = self._rows([0])[0]
        if len(str(self.tokeniser.tokenizer.decode(first.ids)).encode()) > self.config.max_length:
            problems, tally, limit = Problems("data", "demo"), Tally(), Limit(self.config.max_length, "error")
            for row in self._rows(range(len(self._numbers))):
                list(limit.apply(row, tally, problems))
            problems.raise_if_any()

    def _rows(self, indices: Sequence[int]) -> list[Encoded]:
        new = [index for index in dict.fromkeys(indices) if index not in self._known]
        problems = Problems("data", "demo")
        chats = [conversation(self._numbers[index], Place("demo", index + 1, "item")) for index in new]
        rows = self.tokeniser.encode(chats, problems)
        problems.raise_if_any()
        self._known.update(zip(new, rows, strict=True))
        return [self._known[index] for index in indices]


def conversation(number: str, place: Place) -> Chat:
    """The question and the right answer."""
    user = {"role": "user", "content": f"sort {number}"}
    return Chat(place, (user, {"role": "assistant", "content": "".join(sorted(number))}))


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
    config: DemoConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, decide: Decide, cache_dir: Path
) -> DemoData:
    """The demo's data; `cache_dir` is not used, as generating is faster than reading.

    Raises DataError where the tokenizer has no chat template or items are too long.
    """
    data = DemoData(config, Tokeniser(tokenizer), seed)
    for note in sorted(data.tokeniser.notes):
        decide("data.end_token", "learnt", "not learnt", f"data=demo: {note}")
    return data
