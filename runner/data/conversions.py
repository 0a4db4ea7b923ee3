"""Rows in the formats of other projects to the columns of this one.

    ShareGPT        conversations [{from, value}] or messages with these keys          → messages
    Alpaca          instruction, input, output; system, history [[query, response]]    → messages
    query/response  query, response; system, history; question of pairs, OpenOrca      → messages
    ms-swift        conversation [{human, assistant}]; system                          → messages
    ms-swift        messages (or a format above) with tool_call, rejected_… or label   → prompt, chosen and rejected …
    axolotl         messages, chosen and rejected of one message each                  → prompt, chosen, rejected
    MMLU-Pro        question, options or choices, answer_index or answer               → prompt, answer: a letter
    IFEval          prompt, instruction_id_list, kwargs                                → prompt, no answer
    verl, SkyRL     prompt, reward_model or reward_spec: {ground_truth, …}             → prompt, answer: ground_truth

What the algorithm learns from decides the columns: sft gets `messages`; a pair (with `chosen` and `rejected`) and a
labeled completion (with `label` or `kto_tag`) get `prompt` and their answers as messages; a prompt gets `prompt`, and
what the row answers becomes the column `answer`. Formats: LLaMA-Factory data/README.md (ShareGPT, Alpaca, kto_tag),
ms-swift custom data sets (query/response, its own), axolotl docs/rlhf.qmd and docs/input_output.qmd,
tatsu-lab/stanford_alpaca (Alpaca), verl docs/preparation/prepare_data.rst (verl).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, get_args

from runner.core.columns import column_value, json_type_name
from runner.core.untrusted_text import parse_json
from runner.data.examples import CHECKED_COLUMN, Reading, RowError, TextExample, is_messages
from runner.data.message_keys import Message
from runner.data.readers import Row

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "tool_response", "tool"), "tool"),
}
CALLS = ("function_call", "tool_call")  # speakers whose text is JSON: the calls of an assistant turn
SWIFT_ROLES = ("tool_call", "tool_response")  # of ms-swift's messages
SYSTEM = ("system", "system_prompt")  # columns with a system prompt


@dataclass(slots=True)
class Dialogue:
    """A conversation found in a row. `used`: its columns."""

    messages: list[dict[str, Any]]
    used: tuple[str, ...]


Converted = tuple[dict[str, Any], tuple[str, ...]]  # a row in the columns of this project, the columns it was made of


@dataclass(frozen=True, slots=True)
class Conversion:
    """A format of another project. `convert` leaves other columns as they are; it raises RowError."""

    name: str
    matches: Callable[[Mapping[str, Any], Reading], bool]
    convert: Callable[[Mapping[str, Any], Reading], Converted]


def _dialogue(read: Callable[[Mapping[str, Any]], Dialogue]) -> Callable[[Mapping[str, Any], Reading], Converted]:
    """The conversion of rows in which `read` finds a conversation."""

    def convert(value: Mapping[str, Any], reading: Reading) -> Converted:
        dialogue = read(value)
        rest = {name: content for name, content in value.items() if name not in dialogue.used}
        instead = _columns_in(value, *([] if _has_answers(value, reading) else INSTEAD[reading]))
        columns = _columns(dialogue, rest, reading)
        return {**{name: rest[name] for name in rest if name not in instead}, **columns}, (*dialogue.used, *instead)

    return convert


def find_conversion(value: Mapping[str, Any], reading: Reading) -> Conversion | None:
    """The format of another project that a row has, with what the reading needs; or None."""
    instead = any(name in value for name in INSTEAD[reading]) and "chosen_response" not in value
    if not (_has_answers(value, reading) or instead):
        return None
    if "messages" in value and _turns_column(value) is None and not _has_messages(value, reading):
        return None  # messages as they are to be
    return next((conversion for conversion in CONVERSIONS if conversion.matches(value, reading)), None)


def _columns(dialogue: Dialogue, rest: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """The columns of a conversation for what the algorithm learns from."""
    messages = dialogue.messages
    if reading == "sft":
        return {"messages": messages}
    if reading == "pairs" and not _has_answers(rest, reading):
        return _pair(messages, rest)
    if reading == "pairs":
        if messages and messages[-1]["role"] == "assistant":
            text = "the last turn is an answer, and so are chosen and rejected; leave it out"
            column = next((name for name in ("output", "response") if name in dialogue.used), None)
            raise RowError(text + (f", or type data.rename_columns={{{column}: reference}}" if column else ""))
        return {"prompt": messages, **{name: _answer(rest[name], name) for name in BESIDE["pairs"] if name in rest}}
    answered = bool(messages) and messages[-1]["role"] == "assistant"
    prompt, last = (messages[:-1], messages[-1]) if answered else (messages, None)
    if reading == "judged":
        label = {"label": rest["kto_tag"]} if "kto_tag" in rest and not _has_answers(rest, reading) else {}
        return {"prompt": prompt, "completion": [last] if last else [], **label}
    if last is None:
        return {"prompt": prompt}
    if "answer" in rest or "tool_calls" in last:
        what = "is a tool call" if "tool_calls" in last else "and the column answer are two completions"
        raise RowError(f"the last turn {what}; use a column `prompt` and further columns for rewards")
    return {"prompt": prompt, "answer": last["content"]}


def _pair(messages: list[dict[str, Any]], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a chosen conversation; `rest` has the rejected answer or conversation."""
    if "rejected_messages" not in rest:
        rejected = _answer(rest["rejected_response"], "rejected_response")
        return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected}
    if not is_messages(rest["rejected_messages"]):
        raise RowError("column rejected_messages: expected a list of messages")
    other = _joined_turns(rest["rejected_messages"], "rejected_messages")
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(messages[:-1], other[:-1], strict=False))
    start = sum(1 for _ in alike)
    return {"prompt": messages[:start], "chosen": messages[start:], "rejected": other[start:]}


def _answer(value: Any, column: str) -> Any:
    """An answer of a pair as messages: text, one turn in either spelling, or a list of turns as it is."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not is_messages(value) or not any("from" in turn for turn in value):
        return value
    return [_message(turn, f"{column}[{number}]") for number, turn in enumerate(value)]


def _turns_column(value: Mapping[str, Any]) -> str | None:
    """The column of ShareGPT's turns; `messages` only where its turns have the key `from`."""
    if "messages" not in value:
        return "conversations" if is_messages(value.get("conversations")) else None
    turns = value["messages"]
    return "messages" if is_messages(turns) and any("from" in turn for turn in turns) else None


def _read_sharegpt(value: Mapping[str, Any]) -> Dialogue:
    column = _turns_column(value)
    if column is None:
        found = json_type_name(value["conversations"]) if "conversations" in value else "no column conversations"
        raise RowError(f"column conversations: expected a list of turns with the keys from and value, found {found}")
    turns = _joined_turns(value[column], column)
    if (system := _system(value)) and turns and turns[0]["role"] == "system":
        raise RowError(f"a column system and a system turn in {column}; expected one of them")
    return Dialogue([*system, *turns], (column, *_columns_in(value, *SYSTEM)))


def _joined_turns(turns: list[Message], column: str) -> list[dict[str, Any]]:
    """The turns as messages; calls that are turns of their own join the assistant's turn before them."""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        message = _message(turn, f"{column}[{number}]")
        last = messages[-1] if messages else {}
        if turn.get("from", turn.get("role")) in CALLS and len(message) == 3 and last.get("role") == "assistant":
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages


def _message(turn: Message, where: str) -> dict[str, Any]:
    """A turn with the keys role and content, and its other keys; one that has them already stays as it is."""
    if "from" not in turn and turn.get("role") not in SWIFT_ROLES:
        return dict(turn)
    speaker, text = ("from", "value") if "from" in turn else ("role", "content")
    role = SHAREGPT_ROLES.get(turn[speaker]) if isinstance(turn[speaker], str) else None
    if role is None:
        raise RowError(f"{where}.from: unknown speaker {turn['from']!r}; expected one of {', '.join(SHAREGPT_ROLES)}")
    if text not in turn:
        raise RowError(f"{where}: no {text}; expected the keys {speaker} and {text}, found {', '.join(turn)}")
    if speaker == "from" and (twice := [key for key in ("role", "content") if key in turn]):
        raise RowError(
            f"{where}: the keys from, value and {', '.join(twice)}; expected from and value, or role, content"
        )
    others = {key: value for key, value in turn.items() if key not in (speaker, text)}
    if turn[speaker] in CALLS:
        return {**others, "role": role, "content": "", "tool_calls": _tool_calls(turn[text], f"{where}.{text}")}
    return {**others, "role": role, "content": turn[text]}


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a turn `function_call`: JSON text, or an object, or a list, of {name, arguments}."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise RowError(
                f"{where}: text that is not JSON ({error}); expected an object with name, arguments"
            ) from error
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or "name" not in call or not call.keys() <= {"name", "arguments"}:
            raise RowError(f"{where}: expected objects with the keys name and arguments, found {json.dumps(call)}")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _read_exchanges(value: Mapping[str, Any]) -> Dialogue:
    turns: Any = value.get("conversation")
    if not is_messages(turns) or not all({*turn} == {"human", "assistant"} for turn in turns):
        raise RowError("column conversation: expected a list of objects with the keys human and assistant")
    pairs = [(role, turn[key]) for turn in turns for role, key in (("user", "human"), ("assistant", "assistant"))]
    messages = [*_system(value), *({"role": role, "content": content} for role, content in pairs)]
    return Dialogue(messages, _columns_in(value, "conversation", *SYSTEM))


def _has_exchanges(value: Mapping[str, Any], reading: Reading) -> bool:
    turns = value.get("conversation", ())
    return "conversation" in value and not (is_messages(turns) and any("role" in turn for turn in turns))


def _read_messages(value: Mapping[str, Any]) -> Dialogue:
    if not is_messages(value.get("messages")):
        raise RowError(f"column messages: expected a list of messages, found {json_type_name(value.get('messages'))}")
    return Dialogue(_joined_turns(value["messages"], "messages"), ("messages",))


def _has_messages(value: Mapping[str, Any], reading: Reading) -> bool:
    """Whether messages have ms-swift's roles, or answers beside them that are no conversations."""
    turns = value.get("messages", ())
    if not is_messages(turns) or (reading == "pairs" and is_messages(value.get("chosen"))):
        return False
    return reading != "sft" or any(turn.get("role") in SWIFT_ROLES for turn in turns)


def _read_alpaca(value: Mapping[str, Any]) -> Dialogue:
    extra = _optional_text(value, "input")
    question = f"{_text(value, 'instruction')}\n{extra}" if extra else _text(value, "instruction")
    return _exchange(value, question, "output", ("instruction", "input"))


def _read_query(value: Mapping[str, Any]) -> Dialogue:
    column = "query" if "query" in value else "question"
    return _exchange(value, _text(value, column), "response", (column,))


def _is_query(value: Mapping[str, Any], reading: Reading) -> bool:
    """Whether a row has a query; a `question` counts beside what answers it, which prompts leave open."""
    column = "query" if "query" in value or reading in ("prompts", "questions") else "question"
    return _asks(column, "response")(value, reading)


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHOOSE = "Answer with the letter of the right option; end with: The answer is X"


def _read_choices(value: Mapping[str, Any]) -> Dialogue:
    """A question with lettered options; the options stay a column."""
    column = "options" if "options" in value else "choices"
    options, right = value[column], value.get("answer_index", value.get("answer"))
    if not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
        raise RowError(f"column {column}: expected a list of 2 to {len(LETTERS)} options")
    letters = LETTERS[: len(options)]
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(options):
        right = letters[right]
    if not isinstance(right, str) or right not in tuple(letters):
        raise RowError(f"column answer: expected the number of an option from 0, or its letter, found {right!r}")
    lettered = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True))
    question = {"role": "user", "content": f"{_text(value, 'question')}\n\n{lettered}\n\n{CHOOSE}"}
    used = _columns_in(value, "question", "answer", "answer_index")
    return Dialogue([question, {"role": "assistant", "content": right}], used)


def _has_choices(value: Mapping[str, Any], reading: Reading) -> bool:
    return reading in ("prompts", "questions") and "question" in value and bool({"options", "choices"} & value.keys())


def _read_ifeval(value: Mapping[str, Any]) -> Dialogue:
    """A prompt whose answers are checked, not compared."""
    question = {"role": "user", "content": _text(value, "prompt")}
    return Dialogue([question, {"role": "assistant", "content": ""}], ("prompt",))


def _is_ifeval(value: Mapping[str, Any], reading: Reading) -> bool:
    wanted = {"prompt", CHECKED_COLUMN, "kwargs"}
    return reading in ("prompts", "questions") and wanted <= value.keys() and "answer" not in value


TRUTHS = ("reward_model.ground_truth", "reward_spec.ground_truth")  # of verl, of SkyRL


def _truth(value: Mapping[str, Any]) -> str | None:
    return next((path for path in TRUTHS if column_value(value, path) is not None), None)


def _is_verl(value: Mapping[str, Any], reading: Reading) -> bool:
    return reading in ("prompts", "questions") and "prompt" in value and _truth(value) is not None


def _read_verl(value: Mapping[str, Any], reading: Reading) -> Converted:
    """The row with what it is scored by as its answer; its own columns stay for rewards."""
    path = _truth(value)
    if path is None:
        raise RowError(f"no column {' or '.join(TRUTHS)}; found {', '.join(value)}")
    return {**value, "answer": column_value(value, path)}, (path,)


def _exchange(value: Mapping[str, Any], question: str, answer: str, asked: tuple[str, ...]) -> Dialogue:
    """The system prompt, the earlier exchanges, the question, and its answer if the row has one."""
    messages = [*_system(value), *_history(value), {"role": "user", "content": question}]
    if answer in value:
        messages.append({"role": "assistant", "content": value[answer]})
    return Dialogue(messages, _columns_in(value, *asked, answer, *SYSTEM, "history"))


def _history(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of earlier exchanges, [[query, response], …]."""
    history = value.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError("column history: expected a list of [query, response]; a CSV or TSV file cannot hold one")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _system(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = [text for column in SYSTEM if (text := _optional_text(value, column))]
    if len(texts) > 1:
        raise RowError(f"the columns {' and '.join(SYSTEM)} both hold a system prompt; expected one of them")
    return [{"role": "system", "content": text} for text in texts]


def _optional_text(value: Mapping[str, Any], column: str) -> str:
    return _text(value, column) if value.get(column) is not None else ""


def _text(value: Mapping[str, Any], column: str) -> str:
    text = value.get(column)
    if not isinstance(text, str):
        raise RowError(f"column {column}: expected text, found {json_type_name(text)}")
    return text


def _columns_in(value: Mapping[str, Any], *columns: str) -> tuple[str, ...]:
    return tuple(name for name in columns if name in value)


def _asks(question: str, answer: str) -> Callable[[Mapping[str, Any], Reading], bool]:
    """Whether a row has the question, and the answer where the reading needs one from it."""
    return lambda value, reading: question in value and (answer in value or reading in ("pairs", "prompts"))


def segments_example(row: Row, chat: bool) -> TextExample:
    """{"segments"}, of axolotl: texts, each with a label that says whether it is trained on."""
    value, keys = row.value["segments"], {"text", "label"}
    if not is_messages(value) or not all({*one} >= keys and isinstance(one["text"], str) for one in value):
        raise RowError("column segments: expected a list of objects with the keys text and label")
    segments = tuple((one["text"], one["label"]) for one in value)
    if not all(isinstance(label, bool) for _, label in segments) or not any(text and label for text, label in segments):
        raise RowError("column segments: expected labels true or false, at least one of them true")
    return TextExample(row.place, None, "", segments)


# Columns beside the question that hold its answers or what is known of them; and those of other projects instead
BESIDE: Mapping[Reading, tuple[str, ...]] = {"pairs": ("chosen", "rejected"), "judged": ("label",)}
INSTEAD: Mapping[Reading, tuple[str, ...]] = {
    **dict.fromkeys(get_args(Reading), ()),
    "pairs": ("rejected_response", "rejected_messages"),  # ms-swift; the conversation ends with the chosen answer
    "judged": ("kto_tag",),  # LLaMA-Factory
}


def _has_answers(value: Mapping[str, Any], reading: Reading) -> bool:
    return all(name in value for name in BESIDE.get(reading, ()))


VERL = Conversion("verl", _is_verl, _read_verl)
CONVERSIONS = (
    VERL,
    Conversion("ShareGPT", lambda value, reading: _turns_column(value) is not None, _dialogue(_read_sharegpt)),
    Conversion("conversation", _has_exchanges, _dialogue(_read_exchanges)),
    Conversion("messages and answers", _has_messages, _dialogue(_read_messages)),
    Conversion("Alpaca", _asks("instruction", "output"), _dialogue(_read_alpaca)),
    Conversion("query/response", _is_query, _dialogue(_read_query)),
    Conversion("multiple choice", _has_choices, _dialogue(_read_choices)),
    Conversion("IFEval", _is_ifeval, _dialogue(_read_ifeval)),
)
