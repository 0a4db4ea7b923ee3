"""The text of a chat turn, as it comes: reasoning, content and calls of tools apart.

text ─ChatAnswer.push─▶ (reasoning | content, text) … calls, and what is wrong with those that cannot be read
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.core.tool_formats import Part, ToolCall, ToolFormat, Tools, harmony_messages

THINK, END_THINK = "<think>", "</think>"


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of a text that begins a marker without being all of it."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)


@dataclass
class ChatAnswer:
    """Splits the text of a turn.

    Text that was begun as a call, and is none, is content, and an entry of `errors`.

    format: of calls; None = they are text; is_thinking: the prompt has opened a block of reasoning; tools: their
    schemas, which say the type of a value that is written as plain text
    """

    format: ToolFormat | None
    is_thinking: bool = False
    tools: Tools = ()
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _held: str = ""
    _is_first: bool = True  # no content yet: reasoning, and calls that are whole turns, stand only there
    _may_think: bool = True  # no reasoning yet
    _block: str | None = None  # the text of a block of calls that has begun
    _opening: str = ""  # the marker that began it, if it is no part of the block
    _skips_newlines: bool = False  # a marker has just ended

    def __post_init__(self) -> None:
        self._skips_newlines, self._may_think = self.is_thinking, not self.is_thinking

    def push(self, text: str) -> list[tuple[Part, str]]:
        """What more text adds."""
        self._held += text
        found: list[tuple[Part, str]] = []
        while self._step(found):
            pass
        return [(part, piece) for part, piece in found if piece]

    def close(self) -> list[tuple[Part, str]]:
        """What is left, once the turn has ended."""
        found: list[tuple[Part, str]] = []
        while self._block is not None:
            self._end_block(found)
        rest, self._held = self._without_newlines(self._held), ""
        found.append(("reasoning" if self.is_thinking else "content", rest))
        return [(part, piece) for part, piece in found if piece]

    def _step(self, found: list[tuple[Part, str]]) -> bool:
        """Move held text to where it belongs; whether there may be more of it to move."""
        if self._block is not None:
            return self._extend_block(found)
        if self.is_thinking:
            return self._split_at((END_THINK,), "reasoning", found)
        if self._is_first:
            start = self._held.lstrip()
            whole = self.format.opens if self.format and self.format.is_whole_turn else ()
            markers = (THINK, *whole) if self._may_think else whole
            if any(marker.startswith(start) for marker in markers if len(start) < len(marker)):
                return False  # too short to tell
            if self._may_think and start.startswith(THINK):
                self._held, self.is_thinking, self._skips_newlines = start.removeprefix(THINK), True, True
                self._may_think = False
                return True
            self._is_first = False
            if start.startswith(whole) and whole:
                self._block, self._held = start, ""
                return False
        if self.format is not None and not self.format.is_whole_turn:
            return self._split_at((self.format.opens[0], *self.format.bare), "content", found)
        found.append(("content", self._without_newlines(self._held)))
        self._held = ""
        return False

    def _split_at(self, markers: Sequence[str], part: Part, found: list[tuple[Part, str]]) -> bool:
        """Give the text before the first of the markers.

        Line feeds before it wait: they belong to the text only if more of it follows.
        """
        _, mark = min(((self._held.find(one), one) for one in markers if one in self._held), default=(0, ""))
        before, after = self._held.split(mark, 1) if mark else (self._held, "")
        before = self._without_newlines(before)
        cut = 0 if mark else max(overlap(before, one) for one in markers)
        text = before[: len(before) - cut].rstrip("\n")
        found.append((part, text))
        if not mark:
            self._held = before[len(text) :]
            return False
        self._held, self._skips_newlines = after, True
        if part == "reasoning":
            self.is_thinking = False
        else:
            self._opening, self._block = ("", mark) if mark in markers[1:] else (mark, "")
        return True

    def _without_newlines(self, text: str) -> str:
        """The text without the line feeds that follow a marker."""
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return text

    def _extend_block(self, found: list[tuple[Part, str]]) -> bool:
        """Read the block once it is closed; the mark may be a part of an argument, too."""
        assert self.format is not None and self._block is not None
        block, closes = self._block + self._held, self.format.closes
        self._block, self._held = block, ""
        at = block.find(closes) if closes else -1
        while at >= 0:
            if self._read(block[:at], found) is None:
                self._block, self._held, self._skips_newlines = None, block[at + len(closes) :], True
                return True
            at = block.find(closes, at + 1)
        return False

    def _end_block(self, found: list[tuple[Part, str]]) -> None:
        """The turn ends in a block: it is read as it is, or else its text up to the first mark is content.

        Of a turn with channels, only the messages that cannot be read are content.
        """
        assert self.format is not None and self._block is not None
        block, self._block = self._block, None
        if self.format.has_channels:
            for message in harmony_messages(block):
                if (error := self._read(message, found)) is not None:
                    self.errors.append(error)
                    found.append(("content", message))
            return
        if (error := self._read(block, found)) is None:
            return
        self.errors.append(error)
        head, mark, rest = block.partition(self.format.closes) if self.format.closes else (block, "", "")
        found.append(("content", self._opening + head + mark))
        found += self.push(rest)

    def _read(self, block: str, found: list[tuple[Part, str]]) -> str | None:
        """Add the calls of a block; what is wrong with it, None = nothing."""
        assert self.format is not None
        try:
            pieces = self.format.read(block, self.tools)
            calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
            for call in calls:  # raises UnicodeEncodeError for a \ud83d alone, which no client and no tool could get
                json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            return str(error)
        if not pieces:
            return "no call between the marks"
        self.calls += calls
        found += [piece for piece in pieces if not isinstance(piece, ToolCall)]
        return None
