"""Rows to examples: the content of a valid row before tokenization.

reading     functions (…_example)          example
sft         text, chat, completion         TextExample | ChatExample, of which the answer is trained on
pairs       pair, implicit_pair            AnswersExample: one prompt with its answers
judged      labeled                        AnswersExample
prompts     prompt                         PromptExample: a prompt alone
questions   question                       AnswersExample: the prompt with what a right answer says

The columns are there and of the format's type (`chat`: messages, else text) when one of these functions sees them.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runner.core.columns import json_type_name
from runner.core.untrusted_text import parse_json, without_nulls
from runner.data.message_keys import Message, excluding_flags, flag_fault, is_trained, openai_tool_schema
from runner.data.readers import Row, SourceLocation
from runner.spec.base import ItemKind

ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # keys and columns of what is no text


def is_messages(value: Any) -> bool:
    """Whether `value` is a list of objects; an empty list counts, so that it is reported as empty."""
    return isinstance(value, list) and all(isinstance(v, dict) for v in value)


def check_conversation(
    messages: Sequence[Message], names: Sequence[str], context: int, where: str = "the conversation"
) -> None:
    """Raise RowError if something is wrong with the conversation.

    `names[i]` is what the user calls `messages[i]`. The first `context` messages are the prompt's; what is trained on
    must come after them, in what is called `where`.
    """
    _check_messages(messages, names)
    said = [message for message in messages[context:] if message["role"] == "assistant"]
    if said and not any(map(is_trained, said)):
        flag = excluding_flags(said[0])[0]
        raise RowError(f"every assistant turn of {where} is excluded (here by {flag}); expected one to train on")
    if not said:
        found = ", ".join(m["role"] for m in messages[context:]) or "no message"
        raise RowError(f"{where} has no assistant turn; expected a message with role assistant, found {found}")


def check_prompt(messages: Sequence[Message]) -> None:
    """Raise RowError if something is wrong with messages that the assistant is to answer."""
    if not messages:
        raise RowError("column prompt is empty; expected at least one message")
    names = _names("prompt", messages)
    _check_messages(messages, names)
    if messages[-1]["role"] == "assistant":
        text = "the prompt ends with an assistant turn; expected the messages before the answer"
        raise RowError(f"{names[-1]}: {text}")


def _check_messages(messages: Sequence[Message], names: Sequence[str]) -> None:
    """Raise RowError for the first faulty message."""
    for message, name in zip(messages, names, strict=True):
        if fault := _message_fault(message):
            raise RowError(f"{name}{fault}")


def _message_fault(message: Message) -> str | None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return _role_fault(message)
    if fault := flag_fault(message):
        return fault
    if media := [key for key in MEDIA if message.get(key)]:
        return f".{media[0]}: only text can be trained on"
    if message.get("function_call"):
        return ".function_call: an older form of tool calls, which templates do not read; expected tool_calls"
    if content is None and message.get("tool_calls"):
        return None
    if "content" not in message:
        return f": no content; expected the keys role and content, found {', '.join(message)}"
    if isinstance(content, list):
        images = image_parts(message)
        other = next((p for p in content if not (isinstance(p, str) or _is_text_part(p) or p in images)), None)
        if other is not None:
            kind = json_type_name(other)
            if isinstance(other, dict):
                kind = other["type"] if other.get("type", "text") != "text" else f"the keys {', '.join(other)}"
            return f".content: expected parts of type text or image, found {kind}"
        content = join_text_parts(content) or (content if images else "")
        if images and content:
            return None
    if not isinstance(content, str):
        return f".content: expected text, found {json_type_name(content)}"
    if not content.strip() and role in ("user", "assistant") and not message.get("tool_calls"):
        return f".content: the {role}'s turn is empty; expected text"
    return None


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        return False
    return not any(part.get(name) for name in ("image", "image_url", "video", "audio"))


def image_parts(message: Message) -> list[Mapping[str, Any]]:
    """The images of a message, as `runner.data.images` writes them."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "image" and "image" in part]


def user_message(text: str, images: Sequence[Path] = ()) -> dict[str, Any]:
    """A message of the user: images, and the text after them."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "image": str(path.resolve())} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def join_text_parts(content: Any) -> Any:
    """The text of a list of parts, images left out; anything else as it is."""
    if not isinstance(content, list):
        return content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in content)


def _role_fault(message: Message) -> str:
    if "role" not in message:
        sharegpt = "; rename from/value to role/content" if "from" in message else ""
        return f": no role; expected the keys role and content, found {', '.join(message) or 'none'}{sharegpt}"
    role = message["role"]
    if not isinstance(role, str):
        return f".role: expected text, found {json_type_name(role)}"
    close = difflib.get_close_matches(role, ROLES, n=1)
    return f".role: unknown role {role!r}{f'; did you mean {close[0]!r}?' if close else ''} ({', '.join(ROLES)})"


# What rows are read as: the kind of items, or, for held-out prompts, questions with their answers.
Reading = Literal["sft", "pairs", "judged", "prompts", "questions"]
Tools = tuple[Mapping[str, Any], ...]


def held_out_reading(kind: ItemKind) -> Reading:
    """How held-out rows are read: as the training rows, but a prompt needs an answer to compare with."""
    return "questions" if kind == "prompts" else kind


@dataclass(frozen=True, slots=True)
class TextExample:
    """Text to learn after a text to be given; a prompt of None means that there is none, not an empty one."""

    place: SourceLocation
    prompt: str | None
    completion: str
    segments: tuple[tuple[str, bool], ...] = ()  # instead of both: (text, is trained on), to which no token is added


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation; the first `context` messages are context, whatever their role, and never trained on.

    is_question: the last message is what a right answer says, and need not be written as a model would write it
    """

    place: SourceLocation
    messages: tuple[Message, ...]
    context: int = 0
    tools: Tools = ()
    is_question: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, the row's own


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A prompt, as text or as the conversation so far, and the row's other columns (JSON-able)."""

    place: SourceLocation
    prompt: str | tuple[Message, ...]
    tools: Tools = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, the row's own


@dataclass(frozen=True, slots=True)
class AnswersExample:
    """One prompt with one or two answers, each with that prompt, and what is known of them (JSON-able)."""

    place: SourceLocation
    answers: tuple[TextExample, ...] | tuple[ChatExample, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def is_identical_pair(self) -> bool:
        """Whether these are two answers that do not differ."""
        return len(self.answers) == 2 and self.answers[0] == self.answers[1]

    def has_several_turns(self) -> bool:
        """Whether a completion has turns of other roles: their tokens count as well."""
        return any(isinstance(a, ChatExample) and len(a.messages) > a.context + 1 for a in self.answers)


Example = TextExample | ChatExample | PromptExample | AnswersExample


class RowError(Exception):
    """What is wrong with a row."""


def text_example(row: Row, chat: bool) -> TextExample:
    """{"text"}: everything is trained on."""
    return TextExample(row.place, None, _require_text(row.value["text"], "text"))


def chat_example(row: Row, chat: bool) -> ChatExample:
    """{"messages"}: the assistant's turns are trained on."""
    return _chat(row, [], row.value["messages"], "messages")


def completion_example(row: Row, chat: bool) -> TextExample | ChatExample:
    """{"prompt", "completion"}: the completion is trained on."""
    prompt, completion = row.value["prompt"], row.value["completion"]
    return _chat(row, prompt, completion, "completion") if chat else _plain(row, prompt, completion, "completion")


def pair_example(row: Row, chat: bool) -> AnswersExample:
    """{"prompt", "chosen", "rejected"}."""
    return _pair(row, chat, row.value["prompt"], row.value["chosen"], row.value["rejected"])


def implicit_pair_example(row: Row, chat: bool) -> AnswersExample:
    """{"chosen", "rejected"}, which begin with the prompt."""
    chosen, rejected = row.value["chosen"], row.value["rejected"]
    if chat:
        for column in ("chosen", "rejected"):
            names = _names(column, row.value[column])
            check_conversation(row.value[column], names, 0, f"column {column}")
        cut = count_common_messages(chosen, rejected)
    else:
        cut = count_common_characters(_require_text(chosen, "chosen"), _require_text(rejected, "rejected"))
    if not (chosen[:cut] if chat else chosen[:cut].strip()):
        way_out = f"add a column `prompt`, {'with messages like the completions' if chat else 'with text'}"
        raise RowError(f"chosen and rejected have no common start, so there is no prompt; {way_out}")
    return _pair(row, chat, chosen[:cut], chosen[cut:], rejected[cut:])


def labeled_example(row: Row, chat: bool) -> AnswersExample:
    """{"prompt", "completion", "label"}."""
    good = row.value["label"]
    if not isinstance(good, bool):
        hint = "; a CSV file has text only, use JSONL or Parquet" if isinstance(good, str) else ""
        raise RowError(f"column label: expected true or false, found {json_type_name(good)}{hint}")
    answer = _reply(row, chat, row.value["prompt"], row.value["completion"], "completion")
    return AnswersExample(row.place, (answer,), {"good": good})


def prompt_example(row: Row, chat: bool) -> PromptExample:
    """{"prompt"} and all other columns; a completion made of messages is passed as their text."""
    prompt = row.value["prompt"]
    columns = {name: value for name, value in row.value.items() if name != "prompt"}
    if is_messages(columns.get("completion")):
        columns["completion"] = _last_assistant_text(columns["completion"])
    if not chat:
        return PromptExample(row.place, _require_text(prompt, "prompt"), columns=columns)
    check_prompt(prompt)
    return PromptExample(row.place, tuple(prompt), _tools(row), columns)


CHECKED_COLUMN = "instruction_id_list"  # of IFEval rows, whose answers are checked and have nothing to be equal to


def question_example(row: Row, chat: bool) -> AnswersExample:
    """{"prompt", "answer"} and whatever else the row has: a held-out prompt, and what a right answer says."""
    prompt, answer = row.value["prompt"], _as_text(row.value["answer"])
    columns = {name: value for name, value in row.value.items() if name != "prompt"}
    facts = {"messages": prompt if chat else None, "columns": columns}
    if not chat:
        return AnswersExample(row.place, (_plain(row, prompt, answer, "answer"),), facts)
    check_prompt(prompt)
    if CHECKED_COLUMN not in row.value:
        _require_text(answer, "answer")
    messages = (*prompt, {"role": "assistant", "content": answer})
    answer_turn = ChatExample(row.place, messages, len(prompt), _tools(row), is_question=True)
    return AnswersExample(row.place, (answer_turn,), facts)


def count_common_messages(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Number of leading messages that are the prompt: equal ones that an assistant turn follows."""
    most = max(min(len(chosen), len(rejected)) - 1, 0)
    cut = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    while cut and not chosen[cut].get("role") == rejected[cut].get("role") == "assistant":
        cut -= 1
    return cut


def count_common_characters(chosen: str, rejected: str) -> int:
    """Number of leading characters that are the prompt: equal ones, without a part of a word.

    Where nothing stands between the words, as in Chinese, it ends at the first difference.
    """
    most = max(min(len(chosen.rstrip()), len(rejected.rstrip())) - 1, 0)
    cut = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if chosen[cut : cut + 1].isalnum() or rejected[cut : cut + 1].isalnum():
        cut = len(chosen[:cut]) - _count_trailing_alnum(chosen[:cut]) or cut
    return cut - 1 if cut and chosen[cut - 1] == " " else cut


def _count_trailing_alnum(start: str) -> int:
    """How many letters and digits a text ends with."""
    return next((n for n, c in enumerate(reversed(start)) if not c.isalnum()), len(start))


def _pair(row: Row, chat: bool, prompt: Any, chosen: Any, rejected: Any) -> AnswersExample:
    answers = (_reply(row, chat, prompt, chosen, "chosen"), _reply(row, chat, prompt, rejected, "rejected"))
    return AnswersExample(row.place, answers, {"margin": _margin(row.value.get("margin"))})


def _reply(row: Row, chat: bool, prompt: Any, answer: Any, column: str) -> Any:
    """A prompt and one answer, all of whose tokens count: so the assistant begins and ends it."""
    if not chat:
        return _plain(row, prompt, answer, column)
    if flags := [flag for message in answer for flag in excluding_flags(message)]:
        raise RowError(f"column {column}: every token of it counts, so {flags[0]} has no effect; expected no such key")
    found = _chat(row, prompt, answer, column)
    for end, message in (("begins", answer[0]), ("ends", answer[-1])):
        if message["role"] != "assistant":
            raise RowError(
                f"column {column} {end} with a turn of role {message['role']}; expected the assistant's answer"
            )
    return found


def _plain(row: Row, prompt: str, completion: str, column: str) -> TextExample:
    return TextExample(row.place, _require_text(prompt, "prompt"), _require_text(completion, column))


def _chat(row: Row, prompt: Sequence[Message], answer: Sequence[Message], column: str) -> ChatExample:
    """`messages`, or the prompt's and the answer's messages after one another."""
    of_prompt = column != "messages"
    if of_prompt and not prompt:
        raise RowError("column prompt is empty; expected at least one message")
    tools = _tools(row)
    messages = (*prompt, *answer)
    names = [*_names("prompt", prompt), *_names(column, answer)]
    check_conversation(messages, names, len(prompt), f"the {column}" if of_prompt else "the conversation")
    return ChatExample(row.place, messages, len(prompt), tools)


def _require_text(value: str, column: str) -> str:
    if not value.strip():
        raise RowError(f"column {column} is empty; expected text")
    return value


def _names(column: str, messages: Sequence[Message]) -> list[str]:
    return [f"{column}[{i}]" for i in range(len(messages))]


def _margin(value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -sys.float_info.max <= value <= sys.float_info.max:
        raise RowError(f"column margin: expected a finite number, found {value if number else json_type_name(value)}")
    return float(value)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"column answer: expected text or a number, found {json_type_name(value)}")


def _last_assistant_text(messages: Sequence[Message]) -> Any:
    """What the assistant says last; messages that say nothing stay as they are."""
    said = [join_text_parts(m.get("content")) for m in messages if m.get("role") == "assistant"]
    texts = [text for text in said if isinstance(text, str)]
    return texts[-1] if texts else list(messages)


def _tools(row: Row) -> Tools:
    """`tools`: a list of JSON schemas, or that list as JSON text."""
    value = row.value.get("tools")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = without_nulls(parse_json(value))
        except ValueError as error:
            raise RowError(f"column tools: text that is not JSON ({error}); expected a list of JSON schemas") from error
    if not is_messages(value):
        raise RowError(f"column tools: expected a list of JSON schemas, found {json_type_name(value)}")
    return tuple(map(openai_tool_schema, value))
