"""Rows to training examples: which of TRL's SFT formats the data has, and whether every row keeps to it.

    text                    {"text": "…"}                                           ─▶ Plain
    prompt + completion     {"prompt": "…", "completion": "…"}                      ─▶ Plain
    prompt + completion     {"prompt": [message, …], "completion": [message, …]}    ─▶ Chat
    messages                {"messages": [message, …]}                              ─▶ Chat

The first row decides; each later row must have the same format. A Chat may have a column `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runner.data.json_reader import kind
from runner.data.messages import Message, conversation_fault, is_messages
from runner.data.rows import Place, Problems, Row

Kind = Literal["text", "prompt+completion", "messages"]
COLUMNS: dict[Kind, tuple[str, ...]] = {  # in this order: a row with `messages` and `prompt` is a conversation
    "messages": ("messages",),
    "prompt+completion": ("prompt", "completion"),
    "text": ("text",),
}
EXPECTED = "expected the columns `messages`, or `prompt` and `completion`, or `text`"


@dataclass(frozen=True, slots=True)
class Format:
    """What every row of a source has in common."""

    kind: Kind
    chat: bool  # made of messages, not of text

    def __str__(self) -> str:
        return self.kind if self.kind != "prompt+completion" else f"{self.kind} ({'messages' if self.chat else 'text'})"


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
    tools: tuple[Mapping[str, Any], ...] = ()


Example = Plain | Chat


class FormatCheck:
    """Detects the format from the first row and holds the others to it; `ignored` names columns nobody reads."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.format: Format | None = None
        self.first: Place | None = None
        self.ignored: set[str] = set()

    def examples(self, rows: Iterable[Row]) -> Iterator[Example]:
        """An example for each sound row; faults go to `problems`. An unknown format ends the reading."""
        for row in rows:
            if self.format is None:
                self.format, self.first = detect(row.value), row.place
            if self.format is None:
                self.problems.add(row.place, _unknown(row.value))
                return
            self.ignored |= row.value.keys() - {*COLUMNS[self.format.kind], *(["tools"] if self.format.chat else [])}
            example = self._example(self.format, row)
            if isinstance(example, str):
                self.problems.add(row.place, example)
            else:
                yield example

    def _example(self, form: Format, row: Row) -> Example | str:
        """The example, or what is wrong with the row."""
        like = "" if row.place == self.first else f" as at {self.first}"
        missing = [name for name in COLUMNS[form.kind] if name not in row.value]
        if missing:
            return f"no column {', '.join(missing)}; expected {form}{like}, found {_columns(row.value)}"
        values = [row.value[name] for name in COLUMNS[form.kind]]
        for name, value in zip(COLUMNS[form.kind], values, strict=True):
            if not (is_messages(value) if form.chat else isinstance(value, str)):
                wanted = "a list of messages" if form.chat else "text"
                return f"column {name}: expected {wanted}{like}, found {kind(value)}"
        return _chat(row, values) if form.chat else _plain(row, values)


def detect(value: Mapping[str, Any]) -> Format | None:
    """The format of a row, by its columns and the type of the first of them; None if it is none of TRL's."""
    for form, columns in COLUMNS.items():
        if all(name in value for name in columns):
            chat = form == "messages" or (form != "text" and is_messages(value[columns[0]]))
            return Format(form, chat)
    return None


def _plain(row: Row, values: list[Any]) -> Plain | str:
    names = ("prompt", "completion") if len(values) == 2 else ("text",)
    for name, value in zip(names, values, strict=True):
        if not value.strip():
            return f"column {name} is empty; expected text"
    return Plain(row.place, values[0] if len(values) == 2 else None, values[-1])


def _chat(row: Row, values: list[Any]) -> Chat | str:
    """`messages`, or the prompt's and the completion's messages after one another."""
    if len(values) == 2 and not values[0]:
        return "column prompt is empty; expected at least one message"
    tools = _tools(row.value.get("tools"))
    if isinstance(tools, str):
        return tools
    messages = tuple(message for value in values for message in value)
    context = len(values[0]) if len(values) == 2 else 0
    names = [f"messages[{i}]" for i in range(len(messages))]
    if context:
        names = [f"prompt[{i}]" if i < context else f"completion[{i - context}]" for i in range(len(messages))]
    return conversation_fault(messages, names, context) or Chat(row.place, messages, context, tools)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...] | str:
    """`tools` is a list of JSON schemas, or that list as JSON text, as data sets made before `Json()` have it."""
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            return f"column tools: text that is no JSON ({error}); expected a list of JSON schemas"
    if not is_messages(value):
        return f"column tools: expected a list of JSON schemas, found {kind(value)}"
    return tuple(value)


def _columns(value: Mapping[str, Any]) -> str:
    return ", ".join(map(str, value)) or "no column"


def _unknown(value: Mapping[str, Any]) -> str:
    hint = ""
    if "conversations" in value:
        hint = "; rename `conversations` to `messages`, and its keys from/value to role/content"
    elif {"chosen", "rejected"} & value.keys():
        hint = "; chosen and rejected are preference pairs, which sft does not learn"
    elif "prompt" in value:
        hint = "; `prompt` alone has no answer to learn"
    return f"{EXPECTED}; found {_columns(value)}{hint}"
