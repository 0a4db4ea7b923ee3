"""What makes a list of messages a conversation that can be learnt, or a prompt that can be answered."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from runner.data.json_reader import kind

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
