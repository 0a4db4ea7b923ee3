"""The tasks of data=demo: numbered questions, and how each is answered rightly.

    sort   "sort 5031"       ──────────────────────────────────────────────────────▶ "0135"
    sum    "sum 5031 4927"   ──▶ "calc 5031+4927" ──▶ the tool says "9958" ──▶ "9958"
                             ──────────────────────────────────────────────▶ "9958"    in every other conversation

A small model sorts in its head, but does not add in its head: having learnt from these conversations it calls the tool
half of the time and guesses otherwise, and a reward for right answers can teach that the tool is worth asking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from runner.data.config import DemoConfig
from runner.data.messages import Message
from runner.data.order import permutation, stream

SMALL = 10**6  # so many numbers are permuted; of more, some are drawn


class Task(Protocol):
    """Questions 0 … space − 1, all different."""

    @property
    def space(self) -> int: ...

    def question(self, number: int) -> str: ...  # what the user says

    def answer(self, number: int) -> str: ...  # what a right final answer says

    def turns(self, number: int, at_once: bool) -> tuple[Message, ...]: ...  # a way from the question to the answer


@dataclass(frozen=True, slots=True)
class Sort:
    """Sort the digits of a number."""

    digits: int

    @property
    def space(self) -> int:
        """How many questions there are."""
        return 10**self.digits

    def question(self, number: int) -> str:
        """The number with its leading zeros."""
        return f"sort {self._written(number)}"

    def answer(self, number: int) -> str:
        """The digits in order."""
        return "".join(sorted(self._written(number)))

    def wrong(self, number: int, seed: int) -> str:
        """The digits in a seeded order that is not the right one; where all are equal, the last one is changed."""
        right = self.answer(number)
        mixed = "".join(right[i] for i in permutation(len(right), seed, "demo", "wrong", self._written(number)))
        turned = [mixed[i:] + mixed[:i] for i in range(len(mixed))]
        other = next((digits for digits in turned if digits != right), None)
        return other or right[:-1] + str((int(right[-1]) + 1) % 10)

    def turns(self, number: int, at_once: bool) -> tuple[Message, ...]:
        """The answer at once, in any case."""
        return ({"role": "assistant", "content": self.answer(number)},)

    def _written(self, number: int) -> str:
        return str(number).zfill(self.digits)


@dataclass(frozen=True, slots=True)
class Sum:
    """Add numbers of `digits` digits, none of which begins with 0, with the calculator of environment=calculator."""

    digits: int
    terms: int

    @property
    def space(self) -> int:
        """How many questions there are."""
        return self._each**self.terms

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

    @property
    def _each(self) -> int:
        """How many numbers of so many digits there are."""
        return 9 * 10 ** (self.digits - 1)

    def _terms(self, number: int) -> list[int]:
        """The digits of `number` to the base `_each`, each as a number of `digits` digits."""
        return [10 ** (self.digits - 1) + number // self._each**at % self._each for at in range(self.terms)]


def task(config: DemoConfig) -> Task:
    """The task that the config asks for."""
    return Sort(config.digits) if config.task == "sort" else Sum(config.digits, config.numbers_to_add)


def numbers(space: int, count: int, seed: int) -> list[int]:
    """`count` distinct numbers below `space` in seeded order; `count` is at most `space`, which is below 2**63."""
    if space <= max(SMALL, 8 * count):
        drawn: Iterable[int] = permutation(space, seed, "demo").tolist()
    else:  # repeats are rare in so large a space: twice the count is drawn and the first of each number taken
        raw = stream(seed, "demo").random_raw(2 * count + 64)
        drawn = dict.fromkeys((raw % np.uint64(space)).tolist())
    return list(islice(drawn, count))
