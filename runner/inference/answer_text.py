"""Token ids to the text a client reads, cut at stop strings.

ids ─TextStream─▶ text of whole characters ─ChatAnswer─▶ (reasoning | content, text) … tool calls at the end
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from runner.core.chat_answer import END_THINK, THINK, overlap
from runner.core.tool_formats import ToolFormat
from runner.data.control_tokens import assistant_tokens

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of an unfinished character
CONTEXT = 8  # ids of a prompt that its completion is decoded with


def hidden_token_ids(
    tokenizer: Any, stop_token_ids: Iterable[int], tool_format: ToolFormat | None = None
) -> frozenset[int]:
    """The special tokens, which give no text, but for those of reasoning, calls and chat.special_tokens."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *stop_token_ids, *(i for i, token in added.items() if token.special)}
    shown = {THINK, END_THINK, *(tool_format.special if tool_format else ()), *assistant_tokens(tokenizer)}
    return frozenset(special - {i for i, token in added.items() if str(token) in shown})


def token_text(decode: Callable[[list[int]], str], id: int) -> str:
    """A token as it stands inside a text: some decoders leave out the blank of a first token."""
    return decode([id, id])[len(decode([id])) :]


def token_bytes(tokenizer: Any, id: int, text: str) -> bytes:
    """The bytes of a token, which may be a part of a character; text: as `token_text` has it."""
    if REPLACEMENT not in text:
        return text.encode()
    token = str(tokenizer.convert_ids_to_tokens(id))
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):  # SentencePiece
        return bytes.fromhex(byte[1])
    byte_of = _byte_level()
    return bytes(byte_of[char] for char in token) if byte_of.keys() >= set(token) else text.encode()


@cache
def _byte_level() -> dict[str, int]:
    """The bytes by the characters that stand for them in tokens of byte-level BPE."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # which takes long

    return {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class TextStream:
    """The text of an answer's ids, split at character ends and before what may become a stop string.

    decode: ids → text; hidden: ids that give no text, such as end tokens; context: ids that the text continues, without
    which some decoders leave out the blank that it begins with
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        hidden: frozenset[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        context: Sequence[int] = (),
    ) -> None:
        self._decode, self._hidden, self._stops, self._include_stop = decode, hidden, tuple(stops), include_stop
        self._ids = list(context[-CONTEXT:])  # of the piece before, for context, and those not shown yet
        self._shown = decode(self._ids).rstrip(REPLACEMENT) if self._ids else ""
        self._context = len(self._ids)
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
