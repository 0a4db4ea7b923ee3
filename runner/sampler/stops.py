"""When an answer is over: an end token, a stop string in its text, or its last permitted token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 8  # ids before a possible match, because a decoder may treat the first ones of a text differently


class Stops:
    """Ids and strings that end an answer. Strings are sought in the new text, special tokens included."""

    def __init__(self, tokenizer: Any, ids: frozenset[int], strings: Sequence[str]) -> None:
        self._tokenizer, self._ids, self._strings = tokenizer, ids, strings
        # no id is shorter than a byte, so a match that ends in the last id lies within this many
        self._tail = max((len(string.encode()) for string in strings), default=0) + CONTEXT

    def finish(self, ids: Sequence[int], limit: int) -> str | None:
        """Why an answer ends with its last id ("stop" or "length"), or None. To be asked after every id."""
        return self._reason(ids[-self._tail :], len(ids), limit)

    def end(self, ids: Sequence[int], limit: int) -> tuple[int, str] | None:
        """How many of the ids that another drew the answer has, and why it ends there; None if it goes on."""
        for size in range(1, len(ids) + 1):
            if reason := self._reason(ids[max(size - self._tail, 0) : size], size, limit):
                return size, reason
        return None

    def _reason(self, tail: Sequence[int], size: int, limit: int) -> str | None:
        """The same of an answer of `size` ids that ends with these."""
        if tail[-1] in self._ids or self._in_text(tail):
            return "stop"
        return "length" if size >= limit else None

    def _in_text(self, tail: Sequence[int]) -> bool:
        if not self._strings:
            return False
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(string in text for string in self._strings)
