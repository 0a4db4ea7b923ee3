"""What a sound row says, before it becomes tokens, and what makes messages a conversation that can be learnt.

sft                  ─▶ Plain | Chat          of which the answer is learnt
pairs, judged        ─▶ Answers               one prompt with its answers
prompts              ─▶ Ask                   a prompt alone
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.data.readers import kind
from runner.data.rows import Place
from runner.spec.base import ItemKind

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


def is_messages(value: Any) -> bool:
    """Whether `value` is a list of objects; an empty list counts, so that it is reported as empty."""
    return isinstance(value, list) and all(isinstance(v, dict) for v in value)


def is_learnt(message: Message) -> bool:
    """Whether a turn of the assistant is learnt: not where it says `weight: 0`, as OpenAI's format can."""
    return message.get("weight") != 0


def conversation_fault(
    messages: Sequence[Message], names: Sequence[str], context: int, where: str = "the conversation"
) -> str | None:
    """What is wrong with the conversation, or None; `names[i]` is what the user calls `messages[i]`.

    The first `context` messages are the prompt's; what is learnt must come after them, in what is called `where`.
    """
    fault = messages_fault(messages, names)
    said = [message for message in messages[context:] if fault is None and message["role"] == "assistant"]
    if fault or any(map(is_learnt, said)):
        return fault
    if said:
        return f"every assistant turn of {where} has weight 0; expected one to learn"
    found = ", ".join(m["role"] for m in messages[context:]) or "no message"
    return f"{where} has no assistant turn; expected a message with role assistant, found {found}"


def prompt_fault(messages: Sequence[Message], names: Sequence[str]) -> str | None:
    """What is wrong with messages that the assistant is to answer, or None."""
    if not messages:
        return "column prompt is empty; expected at least one message"
    fault = messages_fault(messages, names)
    if fault or messages[-1]["role"] != "assistant":
        return fault
    return f"{names[-1]}: the prompt ends with an assistant turn; expected the messages before the answer"


def messages_fault(messages: Sequence[Message], names: Sequence[str]) -> str | None:
    """What is wrong with the first faulty message, or None."""
    faults = ((name, _message_fault(message)) for message, name in zip(messages, names, strict=True))
    return next((f"{name}{fault}" for name, fault in faults if fault), None)


def _message_fault(message: Message) -> str | None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return _role_fault(message)
    if message.get("weight") not in (None, 0, 1):
        return f".weight: expected 0 (context) or 1 (learnt), found {message['weight']!r}"
    if content is None and message.get("tool_calls"):
        return None
    if "content" not in message:
        return f": no content; expected the keys role and content, found {', '.join(message)}"
    if not isinstance(content, str):
        return f".content: expected text, found {kind(content)}"
    if not content.strip() and role in ("user", "assistant") and not message.get("tool_calls"):
        return f".content: the {role}'s turn is empty; expected text"
    return None


def _role_fault(message: Message) -> str:
    if "role" not in message:
        sharegpt = "; rename from/value to role/content" if "from" in message else ""
        return f": no role; expected the keys role and content, found {', '.join(message) or 'none'}{sharegpt}"
    role = message["role"]
    if not isinstance(role, str):
        return f".role: expected text, found {kind(role)}"
    close = difflib.get_close_matches(role, ROLES, n=1)
    return f".role: unknown role {role!r}{f'; did you mean {close[0]!r}?' if close else ''} ({', '.join(ROLES)})"


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
