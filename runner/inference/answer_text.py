"""Token ids to the text a client reads: reasoning, content and tool calls apart, cut at stop strings.

ids ─TextStream─▶ text of whole characters ─ChatAnswer─▶ (reasoning | content, text) … tool calls at the end
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.data.control_tokens import assistant_tokens

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of an unfinished character
THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"  # Qwen and Hermes: one JSON object between them
PYTHON_TAG = "<|python_tag|>"  # Llama, before the JSON object of a call
SHOWN_MARKERS = (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL, PYTHON_TAG)  # also where they are special tokens


def hidden_token_ids(tokenizer: Any, stop_token_ids: Iterable[int]) -> frozenset[int]:
    """The special tokens, which give no text, but for those of reasoning, calls and chat.special_tokens."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *stop_token_ids, *(i for i, token in added.items() if token.special)}
    shown = {*SHOWN_MARKERS, *assistant_tokens(tokenizer)}
    return frozenset(special - {i for i, token in added.items() if str(token) in shown})


class TextStream:
    """The text of an answer's ids, split at character ends and before what may become a stop string.

    decode: ids → text; hidden: ids that give no text, such as end tokens
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        hidden: frozenset[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._decode, self._hidden, self._stops, self._include_stop = decode, hidden, tuple(stops), include_stop
        self._ids: list[int] = []  # of the piece before, for context, and those not shown yet
        self._shown, self._context = "", 0
        self._held = ""  # may be the beginning of a stop string
        self.stop_reason: str | None = None  # the stop string that was found

    def push(self, token: int) -> str:
        """The text that one more id makes certain."""
        if token in self._hidden or self.stop_reason is not None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._shown) or text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._context :]
        self._shown, self._context = self._decode(self._ids), len(self._ids)
        return self._cut(piece)

    def close(self) -> str:
        """The rest, once the answer has ended."""
        if self.stop_reason is not None:
            return ""
        rest = self._decode(self._ids)[len(self._shown) :] if self._ids else ""
        piece = self._cut(rest)
        held, self._held = self._held, ""
        return piece + held

    def _cut(self, piece: str) -> str:
        """The text up to the first stop string, or up to what may become one."""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.stop_reason = min(found)
            self._held = ""
            return text[: at + (len(self.stop_reason) if self._include_stop else 0)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of a text that begins a marker without being all of it."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls. arguments: JSON text."""

    name: str
    arguments: str


Part = Literal["reasoning", "content"]


@dataclass
class ChatAnswer:
    """Splits the text of a chat answer. Text that was begun as a tool call, and is none, is content.

    is_thinking: whether the prompt has opened a block of reasoning; tools: whether calls are looked for
    """

    tools: bool
    is_thinking: bool = False
    calls: list[ToolCall] = field(default_factory=list)
    _held: str = ""
    _is_first: bool = True  # no content yet: reasoning, and Llama's calls, stand only there
    _in_call: str = ""  # the text of a call that has begun
    _skips_newlines: bool = False  # a marker has just ended

    def __post_init__(self) -> None:
        self._skips_newlines = self.is_thinking

    def push(self, text: str) -> list[tuple[Part, str]]:
        """What more text adds."""
        self._held += text
        found: list[tuple[Part, str]] = []
        while self._step(found):
            pass
        return [(part, piece) for part, piece in found if piece]

    def close(self) -> list[tuple[Part, str]]:
        """What is left, once the answer has ended."""
        rest, self._held = self._held, ""
        if not self._in_call:
            part: Part = "reasoning" if self.is_thinking else "content"
            return [(part, rest)] if rest.strip("\n") or (rest and not self._skips_newlines) else []
        text, self._in_call = self._in_call + rest, ""
        if calls := parse_calls(text):
            self.calls += calls
            return []
        return [("content", text)]

    def _step(self, found: list[tuple[Part, str]]) -> bool:
        """Move held text to where it belongs; whether there may be more of it to move."""
        if self._in_call:
            return self._end_call()
        if self.is_thinking:
            return self._split_at(END_THINK, "reasoning", found)
        if self._is_first:
            start = self._held.lstrip()
            if any(marker.startswith(start) for marker in self._starts() if len(start) < len(marker)):
                return False  # too short to tell
            self._is_first = False
            if start.startswith(THINK):
                self._held, self.is_thinking, self._skips_newlines = start.removeprefix(THINK), True, True
                return True
            if self.tools and start.startswith((PYTHON_TAG, "{")):
                self._in_call, self._held = start, ""
                return False
        return self._split_at(TOOL_CALL, "content", found) if self.tools else self._release_text(found)

    def _starts(self) -> tuple[str, ...]:
        return (THINK, PYTHON_TAG, TOOL_CALL) if self.tools else (THINK,)

    def _release_text(self, found: list[tuple[Part, str]]) -> bool:
        found.append(("content", self._without_newlines(self._held)))
        self._held = ""
        return False

    def _split_at(self, marker: str, part: Part, found: list[tuple[Part, str]]) -> bool:
        """Give the text before the marker.

        Line feeds before it wait: they belong to the text only if more of it follows.
        """
        before, mark, after = self._held.partition(marker)
        before = self._without_newlines(before)
        text = before[: len(before) - (0 if mark else _overlap(before, marker))].rstrip("\n")
        found.append((part, text))
        if not mark:
            self._held = before[len(text) :]
            return False
        self._held, self._skips_newlines = after, True
        if part == "reasoning":
            self.is_thinking = False
        else:
            self._in_call = marker
        return True

    def _without_newlines(self, text: str) -> str:
        """The text without the line feeds that follow a marker."""
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return text

    def _end_call(self) -> bool:
        """Take a call of Qwen's and Hermes' form once it is closed; Llama's ends with the answer."""
        self._in_call, self._held = self._in_call + self._held, ""
        if not self._in_call.startswith(TOOL_CALL) or END_TOOL_CALL not in self._in_call:
            return False
        text, _, after = self._in_call.partition(END_TOOL_CALL)
        if not (calls := parse_calls(text + END_TOOL_CALL)):
            return False  # shown as content at the end
        self.calls += calls
        self._in_call, self._held, self._skips_newlines = "", after, True
        return True


def parse_calls(text: str) -> list[ToolCall]:
    """The calls that a text consists of; [] where it is anything else."""
    text = text.strip().removeprefix(TOOL_CALL).removesuffix(END_TOOL_CALL).removeprefix(PYTHON_TAG).strip()
    decoder, calls = json.JSONDecoder(), list[ToolCall]()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        found = _as_call(value)
        if found is None:
            return []
        calls.append(found)
        text = text[end:].strip().removeprefix(";").strip()  # Llama separates several calls by ;
    return calls


def _as_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
