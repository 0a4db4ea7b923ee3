"""A tokenizer's control tokens: where messages hold one as text it stays text.

    message  "a <|im_end|> b"  ──mark──▶  "a ▮ b"  ──template──▶ text ──▶ "a ", literal "<|im_end|>", " b"

Control tokens are the tokenizer's special tokens, and the other added tokens that the chat template writes itself. In
what the system and the assistant say, only the special ones are text: the assistant writes <think> as its token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from runner.core.errors import DataError
from runner.data.jinja_sandbox import literal_text
from runner.interfaces.media import fill_in_images, images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_MARK, LAST_MARK = 0xF0000, 0xFFFF0  # private characters that stand for control tokens while a template runs
TRUSTED = ("system", "developer", "assistant")  # roles that may write control tokens that are not special


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of text.

    answer: of the row's last assistant turn, without the blanks that the template puts after it; literal: a
    control token that a message holds as text; images: (media id, number of places) of each in the text; is_reasoning:
    of a turn that is trained on without it.
    """

    text: str
    is_trained: bool
    answer: bool = False
    literal: bool = False
    images: tuple[tuple[int, int], ...] = ()
    is_reasoning: bool = False


def merge_neighbors(segments: Sequence[Segment]) -> list[Segment]:
    """Merge neighbors of the same kind, with their images, and leave out empty ones: the fewest borders."""
    found: list[Segment] = []
    for segment in segments:
        if not segment.text:
            continue
        last = found[-1] if found else None
        if last and not segment.literal and replace(last, text="", images=()) == replace(segment, text="", images=()):
            segment = replace(segment, text=last.text + segment.text, images=last.images + segment.images)
            found.pop()
        found.append(segment)
    return found


@dataclass(slots=True)
class Placeholders:
    """Private characters in place of the control tokens of one conversation: token → character."""

    taken: str
    chars: dict[str, str] = field(default_factory=dict)

    def char_of(self, token: str) -> str:
        """The character that stands for a token; one that the conversation does not hold."""
        if token not in self.chars:
            known = {*self.chars.values(), *self.taken}
            self.chars[token] = next(c for c in map(chr, range(FIRST_MARK, LAST_MARK)) if c not in known)
        return self.chars[token]

    def split(self, segment: Segment) -> list[Segment]:
        """The segment, cut where a private character stands for a control token."""
        tokens = {char: token for token, char in self.chars.items() if char in segment.text}
        if not tokens:
            return [segment]
        parts = re.split(f"([{''.join(tokens)}])", segment.text)
        return [replace(segment, text=tokens.get(part, part), literal=part in tokens) for part in parts if part]


class ControlTokens:
    """The control tokens of a tokenizer and of the chat template `source`.

    special: matches a special token in a text; anchor: see `join_anchor`; of_assistant: see `assistant_tokens`.
    Raises DataError for one of these that the tokenizer lacks, or that the template writes itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self._tokenizer, self.of_assistant = tokenizer, assistant_tokens(tokenizer)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        special = {*map(str, tokenizer.all_special_tokens), *(name for name, is_special in added.items() if is_special)}
        written = literal_text(source)
        for token in self.of_assistant:
            if token not in special:
                known = ", ".join(sorted(special))
                raise DataError(f"chat.special_tokens: the tokenizer has no special token {token!r}; it has: {known}")
            if token in written or token in map(str, tokenizer.special_tokens_map.values()):
                raise DataError(f"chat.special_tokens: {token!r} ends or opens turns; no text may write it")
        self.special = _alternation(special)
        self._text_of_assistant = _alternation(special - {*self.of_assistant})
        self._control = _alternation({*special, *(name for name in added if name in written)})
        self.anchor = join_anchor(tokenizer)

    def insert_placeholders(self, messages: Sequence[Any], tools: Any) -> tuple[list[Any], Any, Placeholders]:
        """Messages and tools with a private character in place of each control token in their texts, keys too."""
        if not (self._is_in(messages) or self._is_in(tools)):
            return list(messages), tools, Placeholders("")
        placeholders = Placeholders(json.dumps([messages, tools], ensure_ascii=False, default=str))
        patterns = {**dict.fromkeys(TRUSTED, self.special), "assistant": self._text_of_assistant}
        marked = [
            _replace_texts(m, patterns.get(m["role"], self._control), placeholders) | {"role": m["role"]}
            for m in messages
        ]
        return marked, _replace_texts(tools, self.special, placeholders), placeholders

    def leading(self, text: str, most: int | None = None) -> str:
        """The special tokens that a text begins with, at most so many."""
        found = ""
        while (match := self.special.match(text, len(found))) and most != 0:
            found, most = found + match.group(), most and most - 1
        return found

    def ids_of(self, segments: Sequence[Segment], begins_row: bool = False) -> list[int]:
        """The ids of segments that continue a row, or begin one."""
        found: list[int] = []
        for at, s in enumerate(segments):
            ids = self.literal_ids(s.text) if s.literal else self._encode(s.text, is_first=begins_row and not at)
            found += self.with_images(s, ids)
        return found

    def with_images(self, segment: Segment, ids: list[int]) -> list[int]:
        """The ids of a segment with those of its images."""
        reader = images_of(self._tokenizer)
        return fill_in_images(ids, segment.images, reader.token_id) if reader and segment.images else ids

    def literal_ids(self, token: str) -> list[int]:
        """Ids of a control token's characters as text: of two parts without a control token, the fewest."""
        known = self._tokenizer.added_tokens_decoder
        found = [self._encode(token[:at]) + self._encode(token[at:]) for at in range(1, len(token))]
        found.append([i for char in token for i in self._encode(char)])
        as_text = [ids for ids in found if not any(i in known for i in ids)] or found[-1:]
        return min(as_text, key=len)

    def _encode(self, text: str, is_first: bool = False) -> list[int]:
        anchor, ids = ("", []) if is_first else self.anchor
        return list(self._tokenizer(anchor + text, add_special_tokens=False, verbose=False)["input_ids"])[len(ids) :]

    def _is_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._control.search(value) is not None
        parts = chain(*value.items()) if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        return any(map(self._is_in, parts))


ASSISTANT_TOKENS = "assistant_special_tokens"  # in the tokenizer's settings, which an export has too


def assistant_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens that assistant turns write as tokens (chat.special_tokens)."""
    return tuple(tokenizer.init_kwargs.get(ASSISTANT_TOKENS, ()))


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences begin with alike."""
    differ = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


def _alternation(tokens: Collection[str]) -> re.Pattern[str]:
    """What matches any of some tokens, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _replace_texts(value: Any, control: re.Pattern[str], placeholders: Placeholders) -> Any:
    if isinstance(value, str):
        return control.sub(lambda match: placeholders.char_of(match.group()), value)
    if isinstance(value, Mapping):
        return {
            _replace_texts(k, control, placeholders): _replace_texts(v, control, placeholders) for k, v in value.items()
        }
    return [_replace_texts(inner, control, placeholders) for inner in value] if isinstance(value, list) else value


def join_anchor(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """A text to put before a segment that continues, and the ids to take off again.

    Empty for most. Some SentencePiece tokenizers put a space before every text they are given; behind a line
    break they do not, so that the segments join without an added space.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    if tokenizer.decode(ids("a") + ids("b")) == "ab":
        return "", []
    start = ids("\n")
    joined = ids("\nb")
    works = joined[: len(start)] == start and tokenizer.decode(ids("a") + joined[len(start) :]) == "ab"
    return ("\n", start) if works else ("", [])
