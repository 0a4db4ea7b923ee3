"""OpenAI-style chat messages to the token ids of a prompt, through the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.core.errors import DataError
from runner.inference.answer_text import THINK

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered prompt.

    ids: with what opens the assistant's turn
    is_thinking: that opening begins a block of reasoning
    """

    ids: tuple[int, ...]
    is_thinking: bool


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The prompt of a conversation. The template is applied once, and nothing is put before it.

    Raises DataError for a message that is malformed, a conversation that the template refuses, and one of which it
    leaves words out.
    """
    if not tokenizer.chat_template:
        raise DataError("this model's tokenizer has no chat template; use /v1/completions with a plain prompt")
    if not messages:
        raise DataError("messages is empty; at least one message is needed")
    read = [_template_message(message, at) for at, message in enumerate(messages)]
    try:
        text = str(
            tokenizer.apply_chat_template(
                read,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **(template_kwargs or {}),
            )
        )
    except Exception as error:  # a template is a foreign program and may fail in any way
        raise DataError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
    _check_nothing_lost(read, text)
    _check_tools_shown(tools, text)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ChatPrompt(tuple(ids), text.rstrip().endswith(THINK))


def _template_message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """A message as templates know it: text as one string, the arguments of tool calls as an object."""
    where, role = f"messages[{at}]", message.get("role")
    if role not in ROLES:
        raise DataError(f"{where}.role: {role!r} is none of {', '.join(ROLES)}")
    known = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    if unknown := sorted(set(message) - set(known)):
        raise DataError(f"{where}.{unknown[0]}: not supported; a message has {', '.join(known)}")
    read = {key: value for key, value in message.items() if value is not None}
    if role == "developer":
        read["role"] = "system"
    read["content"] = _text(message.get("content"), where)
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [_template_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return read


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise DataError(f"{where}.content: a text or a list of text parts is needed")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}.content: only parts of type text are supported")
    return "".join(part["text"] for part in content)


def _template_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}.function.name: a name is needed")
    arguments = function.get("arguments") or "{}"
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{where}.function.arguments: a JSON object is needed")
    return {"type": "function", "id": call.get("id"), "function": {"name": function["name"], "arguments": value}}


def _check_nothing_lost(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise DataError where a message's words are not in the rendered text."""
    for at, message in enumerate(messages):
        words = [message["content"].strip()]
        words += [call["function"]["name"] for call in message.get("tool_calls", ())]
        for word in words:
            if word and word not in text and json.dumps(word, ensure_ascii=False)[1:-1] not in text:
                raise DataError(
                    f"messages[{at}]: the chat template leaves out words of this {message['role']} message, such as "
                    f"{word[:40]!r}; leave the message out, or serve a model whose template has this role"
                )


def _check_tools_shown(tools: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise DataError where a tool is malformed, or not in the rendered text."""
    for at, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise DataError(f"tools[{at}]: only tools of type function, with a function.name, are supported")
        if str(function["name"]) not in text:
            raise DataError(
                "the chat template of this model shows it no tools; leave out tools, or serve a model that was "
                "trained with them"
            )
