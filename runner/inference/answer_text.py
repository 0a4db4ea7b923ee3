"""Token ids to the text a client reads, cut at stop strings.

ids ─TextStream─▶ text of whole characters ─ChatAnswer─▶ (reasoning | content, text) … tool calls at the end
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runner.core.chat_answer import END_THINK, THINK, overlap
from runner.core.tool_formats import ToolFormat
from runner.data.control_tokens import assistant_tokens

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of an unfinished character


def hidden_token_ids(
    tokenizer: Any, stop_token_ids: Iterable[int], tool_format: ToolFormat | None = None
) -> frozenset[int]:
    """The special tokens, which give no text, but for those of reasoning, calls and chat.special_tokens."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *stop_token_ids, *(i for i, token in added.items() if token.special)}
    shown = {THINK, END_THINK, *(tool_format.special if tool_format else ()), *assistant_tokens(tokenizer)}
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
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
