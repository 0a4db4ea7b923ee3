"""What a sound row says, before it becomes tokens.

sft                  ─▶ Plain | Chat          of which the answer is learnt
pairs, judged        ─▶ Answers               one prompt with its answers
prompts              ─▶ Ask                   a prompt alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.data.messages import Message
from runner.data.rows import Place
from runner.spec.base import ItemKind

# What rows are read as: the kind of items, or, for held-out prompts, questions with their answers.
Reading = Literal["sft", "pairs", "judged", "prompts", "questions"]
Tools = tuple[Mapping[str, Any], ...]


def held_out_reading(kind: ItemKind) -> Reading:
    """How held-out rows are read: as the training rows, but a prompt needs an answer to compare with."""
    return "questions" if kind == "prompts" else kind


@dataclass(frozen=True, slots=True)
class Plain:
    """Text to learn after a text to be given; a prompt of None means that there is none, not an empty one."""

    place: Place
    prompt: str | None
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; the first `context` messages are given, whoever speaks, and never learnt."""

    place: Place
    messages: tuple[Message, ...]
    context: int = 0
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, as text or as the conversation so far, and the row's other columns (JSON-able)."""

    place: Place
    prompt: str | tuple[Message, ...]
    tools: Tools = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answers:
    """One prompt with one or two answers, each with that prompt, and what is known of them (JSON-able)."""

    place: Place
    answers: tuple[Plain, ...] | tuple[Chat, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def alike(self) -> bool:
        """Whether these are two answers that do not differ."""
        return len(self.answers) == 2 and self.answers[0] == self.answers[1]

    def several_turns(self) -> bool:
        """Whether somebody else speaks within an answer: his tokens count as well."""
        return any(isinstance(a, Chat) and len(a.messages) > a.context + 1 for a in self.answers)


Example = Plain | Chat | Ask | Answers
