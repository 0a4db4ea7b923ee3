"""Prompts and their answers to tokens: the prompt once, and each answer as the ids that follow it.

    Answers ──Tokeniser, each answer with the prompt──▶ ids = prompt + answer ──cut where the answer begins──▶ Answered
    Ask     ──Tokeniser.prompts───────────────────────▶ prompt                                             ──▶ Answered

So prompt + answer are the very tokens that sft has for them, without the blanks after the end token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.data.examples import Answers, Ask, Chat, Example, Plain
from runner.data.rows import Place, Problems
from runner.data.tokenise import Encoded, Tokeniser


@dataclass(frozen=True, slots=True)
class Answered:
    """A tokenised prompt with its answers (none, one or two), and what is known of them (JSON-able)."""

    place: Place
    prompt: list[int]
    answers: list[list[int]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What is stored of it."""
        return {"prompt": self.prompt, "answers": self.answers, "facts": json.dumps(self.facts, allow_nan=False)}


def encode(tokeniser: Tokeniser, examples: Sequence[Example], problems: Problems) -> list[Encoded | Answered]:
    """Tokens of each example; those of one source are all of one type, so that their order stays.

    One that cannot be encoded goes to `problems`. Raises DataError.
    """
    single = [e for e in examples if isinstance(e, Plain | Chat)]
    asks = [e for e in examples if isinstance(e, Ask)]
    answers = [e for e in examples if isinstance(e, Answers)]
    return [*tokeniser.encode(single, problems), *asked(tokeniser, asks), *answered(tokeniser, answers, problems)]


def asked(tokeniser: Tokeniser, asks: Sequence[Ask]) -> list[Answered]:
    """Each prompt alone, with its conversation and its other columns. Raises DataError."""
    facts = [{"messages": a.prompt if isinstance(a.prompt, tuple) else None, "columns": a.columns} for a in asks]
    return [
        Answered(ask.place, prompt, [], known)
        for ask, prompt, known in zip(asks, tokeniser.prompts(asks), facts, strict=True)
    ]


def answered(tokeniser: Tokeniser, rows: Sequence[Answers], problems: Problems) -> list[Answered]:
    """Each prompt with its answers; a row of which one cannot be encoded goes to `problems`. Raises DataError."""
    flat = iter(tokeniser.each([answer for row in rows for answer in row.answers], problems))
    found = []
    for row in rows:
        each = [answer for answer in [next(flat) for _ in row.answers] if answer is not None]
        if len(each) == len(row.answers):
            prompt = each[0].ids[: each[0].answer[0]]
            found.append(Answered(row.place, prompt, [e.ids[slice(*e.answer)] for e in each], row.facts))
    return found
