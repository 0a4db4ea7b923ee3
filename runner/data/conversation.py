"""Messages as chat templates take them, and the check that a template writes all of what they say.

messages ──plain_messages──▶ one form for all templates ──template──▶ text ◀──find_missing── every content, call,
                                                                              reasoning, system prompt, tool name
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from runner.core.untrusted_text import parse_json, shorten
from runner.data.examples import Tools, image_parts, join_text_parts
from runner.data.message_keys import REASONING_KEYS, TRAIN_FLAGS, Message

Part = Literal["content", "reasoning", "tool call", "tool"]
THINK = re.compile(r"</?think>|\[/?THINK\]")  # reasoning that stands in the content
COUNTED = 40  # a text of at most so many characters must occur as often as it was made
SHOWN = 40


@dataclass(frozen=True, slots=True)
class Statement:
    """A text that a message says; `index` is the message's, None for a tool of the column `tools`."""

    index: int | None
    role: str
    part: Part
    text: str

    def __str__(self) -> str:
        text = shorten(self.text, SHOWN)
        if self.index is None:
            return f"the tool {text!r} of column tools"
        return f"the {self.part} of messages[{self.index}] (role {self.role}): {text!r}"


class CallForm(NamedTuple):
    """How a template takes tool calls: arguments as JSON text or as an object, no content as None."""

    text_arguments: bool
    content: str | None


CALL_FORMS = (CallForm(False, ""), CallForm(False, None), CallForm(True, ""), CallForm(True, None))


def plain_messages(messages: Sequence[Message], drop: Sequence[str], form: CallForm) -> list[dict[str, Any]]:
    """Messages in the form that a template knows, without what `drop` names.

    Text parts are joined unless images are between them, tool calls have `form`, and reasoning stands under both usual
    keys.
    """
    return [_plain_message(message, "reasoning" in drop, form) for message in messages]


def _plain_message(message: Message, without_reasoning: bool, form: CallForm) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if name not in (*TRAIN_FLAGS, *REASONING_KEYS)}
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    if reasoning and not without_reasoning:
        found |= {"reasoning_content": reasoning, "thinking": reasoning}
    images = image_parts(message)
    found["content"] = (
        [
            {"type": "image"} if part in images else {"type": "text", "text": join_text_parts([part])}
            for part in message["content"]
        ]
        if images
        else join_text_parts(found.get("content"))
    )
    if found.get("tool_calls"):
        found["tool_calls"] = [_plain_call(call, form.text_arguments) for call in found["tool_calls"]]
        found["content"] = found["content"] or form.content
    else:
        found.pop("tool_calls", None)
    return found


def _plain_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = dict(call.get("function", call))
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not as_text:
        with suppress(ValueError):
            parsed = parse_json(arguments)
            function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    elif as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    if "function" not in call:
        return function
    return {**call, "function": function} | ({"type": call.get("type", "function")} if as_text else {})


def statements(messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> list[Statement]:
    """Everything that plain messages say, in their order, and the names of the tools."""
    found = [Statement(None, "tool", "tool", name) for name in map(_tool_name, tools) if name]
    for index, message in enumerate(messages):
        role = str(message["role"])
        thoughts, content, *more = message.get("reasoning_content") or "", *_texts(message.get("content"))
        if role == "assistant" and (marks := list(THINK.finditer(content))):
            thoughts, content = f"{thoughts}{content[: marks[-1].start()]}", content[marks[-1].end() :]
        texts: list[tuple[Part, str]] = [("reasoning", part) for part in THINK.split(thoughts)]
        texts += [("content", text) for text in (content, *more)]
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            leaves = (str(function.get("name", "")), *_leaves(function.get("arguments")))
            texts += [("tool call", leaf) for leaf in leaves]
        found += [Statement(index, role, part, stripped) for part, text in texts if (stripped := text.strip())]
    return found


def _texts(content: Any) -> list[str]:
    """The texts of a message's content, at least one."""
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"] or [""]
    return [content or ""]


def content_parts(content: Any) -> Any:
    """A message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _leaves(value: Any) -> Iterator[str]:
    """Keys and values of JSON as text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def find_missing(expected: Sequence[Statement], text: str) -> list[Statement]:
    """The statements that a text does not contain.

    A short one has to occur as often as it was made: the answer 4 is no proof that a tool's 4 was written.
    """
    times = Counter(statement.text for statement in expected if len(statement.text) <= COUNTED)
    return [statement for statement in expected if not _contains(text, statement.text, times.get(statement.text, 1))]


def _contains(text: str, wanted: str, times: int) -> bool:
    """Whether `wanted` occurs in `text` at least `times` times.

    As it is, as JSON, as the values of its JSON, or without regard to blanks.
    """
    if times == 1 and wanted in text:
        return True
    forms = (wanted, json.dumps(wanted, ensure_ascii=False)[1:-1], json.dumps(wanted)[1:-1])
    if sum(text.count(form) for form in dict.fromkeys(forms)) >= times:
        return True
    if _without_blanks(text).count(_without_blanks(wanted)) >= times:
        return True
    if wanted[:1] in "{[":
        try:
            leaves = list(_leaves(parse_json(wanted)))
        except ValueError:
            return False
        return bool(leaves) and all(leaf.strip() in text for leaf in leaves)
    return False


def _without_blanks(text: str) -> str:
    return "".join(text.split())
