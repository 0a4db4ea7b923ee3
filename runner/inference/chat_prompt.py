"""OpenAI-style chat messages to the token ids of a prompt, through the one chat renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.core.chat_answer import THINK
from runner.core.errors import DataError
from runner.data.chat import NO_VARIABLES, Renderer
from runner.data.chat_template import RenderError


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered prompt.

    ids: with what opens the assistant's turn
    is_thinking: that opening begins a block of reasoning
    """

    ids: tuple[int, ...]
    is_thinking: bool


def render_chat(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> ChatPrompt:
    """The prompt of a conversation; control tokens inside messages are text. variables: of the template.

    Raises DataError for one that the template refuses, or of which it omits a part.
    """
    if not messages:
        raise DataError("messages is empty; at least one message is needed")
    if "developer" not in renderer.template.source:  # OpenAI's newer name of the system prompt
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        segments = renderer.render_prompt(messages, tuple(tools), variables)
    except RenderError as error:
        way = "; leave it out, or serve a model whose chat template writes it"
        raise DataError(f"{error}{'' if isinstance(error.__cause__, DataError) else way}") from error  # of an image
    text = "".join(segment.text for segment in segments)
    return ChatPrompt(tuple(renderer.control.ids_of(segments, begins_row=True)), text.rstrip().endswith(THINK))
