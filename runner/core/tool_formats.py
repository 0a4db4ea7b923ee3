"""The formats in which models write calls of tools, for training, evaluation and `run serve`.

    name       a call
    hermes     <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>                  Qwen2.5, Qwen3, Hermes
    qwen_xml   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>     Qwen3-Coder, Qwen3.5
    glm        <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>         GLM-4.5 and later
    llama3     {"name": "f", "parameters": {"x": 1}}                                        the whole turn
    mistral    [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}], or [TOOL_CALLS]f[ARGS]{"x": 1}
    deepseek   <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>              V3.1; V3 fences the JSON
    gpt_oss    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}    OpenAI's Harmony

Sources: the chat templates of these models. Formats without JSON write values as plain text; the schema says the type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.core.untrusted_text import shorten

Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as chat templates take them
Part = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls."""

    name: str
    arguments: dict[str, Any]


Piece = ToolCall | tuple[Part, str]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    opens, closes: what stands around a block of calls; no `closes` = a block ends with the turn
    read: the calls of a block, or its texts too. Raises ValueError for anything else.
    bare: what begins a block, and belongs to it, where the model left out `opens`
    is_whole_turn: a turn that begins with one of `opens` is one block, which includes that
    special: texts that may be special tokens
    has_channels: a block is a turn of `harmony_messages`, each read alone; turns without a call are read, too
    """

    name: str
    opens: tuple[str, ...]
    closes: str
    read: Callable[[str, Tools], Sequence[Piece]]
    bare: tuple[str, ...] = ()
    is_whole_turn: bool = False
    special: tuple[str, ...] = ()
    has_channels: bool = False


def _json_calls(text: str, _: Tools = ()) -> list[ToolCall]:
    """JSON objects, `;` or blanks between them, or a list of them."""
    decoder, calls, text = json.JSONDecoder(), list[ToolCall](), text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        calls += map(_as_call, value if isinstance(value, list) else [value])
        text = text[end:].strip().removeprefix(";").strip()
    return calls


def _as_call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('expected {"name": …, "arguments": {…}}')
    return ToolCall(value["name"], _arguments(value.get("arguments", value.get("parameters"))))


def _arguments(value: Any) -> dict[str, Any]:
    """An object, or the text of one."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError("the arguments are no JSON object")
    return found


def _llama3(text: str, _: Tools) -> Sequence[Piece]:
    """Calls after <|python_tag|>, or without it; there an object without a name is an answer, as in vLLM."""
    body = text.strip()
    if body.startswith("{") and not _has_name(body):
        return [("content", text)]
    return _json_calls(body.removeprefix("<|python_tag|>"))


def _has_name(text: str) -> bool:
    """Whether the JSON object at the beginning has the key "name"; of a broken one, the text."""
    try:
        return "name" in json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return '"name"' in text


def _mistral(text: str, _: Tools) -> list[ToolCall]:
    calls = list[ToolCall]()
    for part in text.split("[TOOL_CALLS]"):
        name, mark, arguments = part.partition("[ARGS]")
        if mark:
            calls.append(ToolCall(name.partition("[CALL_ID]")[0].strip(), _arguments(arguments)))
        else:
            calls += _json_calls(part)
    return calls


def _deepseek(text: str, _: Tools) -> list[ToolCall]:
    found = re.findall(
        r"\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)|(.+)", text, re.DOTALL
    )
    calls = []
    for name, body, rest in found:
        if rest.strip():
            raise ValueError(f"text between calls: {shorten(rest.strip(), 40)!r}")
        if fenced := re.fullmatch(r"(.*?)\n```json\n(.*?)\n?(?:```)?\s*", body, re.DOTALL):  # V3: the name stands there
            name, body = fenced.groups()
        if name.strip():
            calls.append(ToolCall(name.strip(), _arguments(body)))
    return calls


def _qwen_xml(text: str, tools: Tools) -> list[ToolCall]:
    found = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)\s*(?:</function>)?\s*", text, re.DOTALL)
    if found is None:
        raise ValueError("expected <function=NAME>…</function>")
    pair = r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    return [ToolCall(found[1], _read_pairs(found[2], pair, found[1], tools))]


def _glm(text: str, tools: Tools) -> list[ToolCall]:
    name, mark, pairs = text.partition("<arg_key>")
    if not name.strip() or re.search(r"[\s{}<>]", name.strip()):
        raise ValueError("expected the name of a tool")
    pair = r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    return [ToolCall(name.strip(), _read_pairs(mark + pairs, pair, name.strip(), tools))]


def _read_pairs(text: str, pair: str, name: str, tools: Tools) -> dict[str, Any]:
    """The arguments that are written as names and values, typed by the tool's schema."""
    if rest := re.sub(pair, "", text, flags=re.DOTALL).strip():
        raise ValueError(f"text that is no argument: {shorten(rest, 40)!r}")
    functions = [tool.get("function", tool) for tool in tools]
    schemas = (f.get("parameters", {}).get("properties", {}) for f in functions if f.get("name") == name)
    schema: Mapping[str, Any] = next(schemas, {})
    return {key: _typed_value(value, schema.get(key, {})) for key, value in re.findall(pair, text, re.DOTALL)}


def _typed_value(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of an argument that is written without quotes; Python's words too, which templates write."""
    types = [one.get("type") for one in (schema, *schema.get("anyOf", ()))]
    if "string" in types or any("string" in one for one in types if isinstance(one, list)):
        return text
    words = {"True": True, "False": False, "None": None}
    try:
        value = words[text] if text in words else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>(?:<\|start\|>assistant)?")
CUT_HEADER = re.compile(r"\s*(?:<\|(?:start|channel|constrain)\|>\w*\s*)*")  # of a message without a recipient


def harmony_messages(turn: str) -> list[str]:
    """The messages of a turn; one that was cut before its text is left out, as by openai-harmony."""
    return [one for one in MESSAGE_END.split(turn) if not CUT_HEADER.fullmatch(one)]


def _gpt_oss(message: str, _: Tools) -> list[Piece]:
    """A message, with a channel or a recipient in its header."""
    header, mark, body = message.partition("<|message|>")
    if not mark:
        raise ValueError("expected <|channel|>…<|message|>…")
    if recipient := re.search(r"to=functions\.([^\s<]+)", header):
        return [ToolCall(recipient[1], _arguments(body))]
    return [("reasoning" if "<|channel|>analysis" in header else "content", body)]


CALL, END_CALL = "<tool_call>", "</tool_call>"
_DEEPSEEK_TOKENS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_HARMONY_TOKENS = ("start", "end", "message", "channel", "constrain", "call")
FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", (CALL,), END_CALL, _json_calls, special=(CALL, END_CALL)),
        ToolFormat("qwen_xml", (CALL,), END_CALL, _qwen_xml, ("<function=",), special=(CALL, END_CALL)),
        ToolFormat("glm", (CALL,), END_CALL, _glm, special=(CALL, END_CALL)),
        ToolFormat("llama3", ("<|python_tag|>", "{"), "", _llama3, is_whole_turn=True, special=("<|python_tag|>",)),
        ToolFormat("mistral", ("[TOOL_CALLS]",), "", _mistral, special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
        ToolFormat(
            *("deepseek", ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>", _deepseek),
            special=tuple(f"<｜tool▁{name}｜>" for name in _DEEPSEEK_TOKENS),
        ),
        ToolFormat(
            *("gpt_oss", ("<|channel|>", "to=functions."), "", _gpt_oss),
            is_whole_turn=True,
            special=tuple(f"<|{name}|>" for name in _HARMONY_TOKENS),
            has_channels=True,
        ),
    )
}
