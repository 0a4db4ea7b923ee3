"""Examples to tokens: ids, loss mask, span of the last answer; and the digest of what they depend on.

    ChatExample    ──Renderer.render──▶ rows of (text, trained on?)  ──┐
    TextExample    ───────────────────▶ one row of them              ──┴─ one call ──▶ EncodedExample | EncodedRows
    AnswersExample ──each answer with the prompt──▶ ids ──cut where the answer begins──▶ EncodedAnswers
    PromptExample  ──the prompt alone──▶ ids ─────────────────────────────────────────▶ EncodedAnswers without any

What is trained on follows from the segment a token came from, never from its value: an end-of-sequence token is
trained on although it may also be the padding token. The first token of a row is never trained on: nothing predicts it.
A prompt and its answer are the very tokens that sft has for them, without the blanks after the end token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from runner.core.errors import DataError
from runner.core.media import MEDIA_ID
from runner.data.chat import Renderer, TrainOn, UnopenedError
from runner.data.chat_template import RenderError, RenderTimeout
from runner.data.config import ChatConfig
from runner.data.control_tokens import ControlTokens, Segment, common_length, merge_neighbors
from runner.data.examples import AnswersExample, ChatExample, Example, PromptExample, TextExample, image_parts
from runner.data.message_keys import Message, excluding_flags
from runner.data.readers import Problems, SourceLocation
from runner.interfaces.media import ImageReader, images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 5  # raise it when the same rows give other items or tokens, so that no old cache is used


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """A tokenized example.

    answer: half-open span of the last assistant turn, (0, 0) if there is none; branches: start of each
    continuation of a shared prefix, in order; none where the example is one row.
    """

    place: SourceLocation
    ids: list[int]
    loss_mask: list[int]  # 1 = trained on, 0 = context
    answer: tuple[int, int] = (0, 0)
    branches: list[int] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """What is stored of it."""
        first, last = self.answer
        return {"ids": self.ids, "loss_mask": self.loss_mask, "first": first, "last": last, "branches": self.branches}


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """An example of several rows, each the whole context of the turns that it trains on."""

    rows: list[EncodedExample]

    @property
    def place(self) -> SourceLocation:
        """Where the example comes from."""
        return self.rows[0].place


def share_prefix(rows: Sequence[EncodedExample]) -> EncodedExample | None:
    """Rows as one example with their common prefix once; None if they have none.

    The prefix ends before the first token that any row trains on. The answer is that of the last row.
    """
    if len(rows) == 1:
        return rows[0]
    shared = min(min(common_length(rows[0].ids, row.ids), row.loss_mask.index(1)) for row in rows)
    if not shared:
        return None
    ids, loss_mask, branches = list(rows[0].ids[:shared]), [0] * shared, []
    for row in rows:
        branches.append(len(ids))
        ids += row.ids[shared:]
        loss_mask += row.loss_mask[shared:]
    moved = branches[-1] - shared
    first, last = rows[-1].answer
    return EncodedExample(rows[0].place, ids, loss_mask, (first + moved, last + moved) if last else (0, 0), branches)


class ExampleTokenizer:
    """A tokenizer with the options that turn examples into tokens; `notes`: what a user should know.

    train_on: None = as the options of `chat` say
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatConfig | None = None,
        train_on: TrainOn | None = None,
    ) -> None:
        self.tokenizer, self.chat = tokenizer, chat or ChatConfig()
        self.train_on: TrainOn = train_on or self.chat.train_on
        self.notes: set[str] = set()
        self._text_notes: set[str] = set()
        self._bos, self._eos = bos_and_eos(tokenizer)
        self._control = ControlTokens(tokenizer, "")

    @cached_property
    def renderer(self) -> Renderer:
        """The chat template. Raises DataError if there is none."""
        return Renderer(self.tokenizer, self.chat)

    @property
    def chat_notes(self) -> set[str]:
        """What was noticed of control tokens in conversations and texts, and of lost reasoning."""
        return self._text_notes | (self.renderer.notes if "renderer" in self.__dict__ else set())

    def encode(
        self, examples: Sequence[Example], problems: Problems
    ) -> list[EncodedExample | EncodedRows | EncodedAnswers]:
        """Tokens of each example in order; one that cannot be encoded goes to `problems`. Raises DataError."""
        parts = [e.answers if isinstance(e, AnswersExample) else (e,) for e in examples]
        rows = iter(self._encode_each([part for some in parts for part in some], problems))
        each = [[row for row in [next(rows) for _ in some] if row is not None] for some in parts]
        complete = zip(examples, parts, each, strict=True)
        made = [_combine(example, made) for example, some, made in complete if len(made) == len(some)]
        return [self._storable(one) if isinstance(one, EncodedAnswers) else one for one in made]

    def _storable(self, row: EncodedAnswers) -> EncodedAnswers:
        """The row with messages that have JSON forms: contents of images as paths or data URLs."""
        reader, messages = images_of(self.tokenizer), row.facts.get("messages")
        if reader is None or not messages or not any(map(image_parts, messages)):
            return row
        return replace(row, facts={**row.facts, "messages": [_with_locations(one, reader) for one in messages]})

    def _encode_each(
        self, examples: Sequence[TextExample | ChatExample | PromptExample], problems: Problems
    ) -> list[EncodedExample | EncodedRows | None]:
        """None for each example that cannot be encoded; several of one row are one problem."""
        plans: list[list[list[Segment]]] = []
        failed: dict[SourceLocation, RenderError] = {}
        for example in examples:
            try:
                plans.append(self._plan(example))
            except RenderTimeout as error:  # at the first row: a deadline for each one would be hours for all
                text = f"{example.place}: {error}; set chat.template=FILE to a template that ends"
                raise DataError(text) from error
            except RenderError as error:
                plans.append([])
                failed.setdefault(example.place, error)
        for place, fault in failed.items():
            problems.add_fault(place, str(fault), fault.hint)
        rows = [row for plan in plans for row in plan]
        contexts = [_context(row, runs[-1][0]) if len(runs := _trained_runs(row)) > 1 else [] for row in rows]
        texts = [(s.text, at > 0, s.literal) for some in (*rows, *contexts) for at, s in enumerate(some)]
        parts = iter(self._tokens(texts))
        ids = [[next(parts) for _ in row] for row in rows]
        exact = [list(chain(*(next(parts) for _ in context))) for context in contexts]
        made = iter([self._exact_rows(*one) for one in zip(rows, ids, exact, strict=True)])
        found = [
            [self._assemble(example, *one) for _ in plan for one in next(made)]
            for example, plan in zip(examples, plans, strict=True)
        ]
        return [(some[0] if len(some) == 1 else EncodedRows(some)) if some else None for some in found]

    def _exact_rows(
        self, row: list[Segment], ids: list[list[int]], context: list[int]
    ) -> list[tuple[list[Segment], list[list[int]]]]:
        """A row with its ids; several where generation sees other ids of the turns before one.

        A tokenizer may join the end of a context and the beginning of a turn, once both are the context of the next
        turn. context: what generation sees before the last of several trained turns, else empty
        """
        if list(chain(*ids))[: len(context)] == context:
            return [(row, ids)]
        rows, end = list[list[Segment]](), 0
        for start, stop in _trained_runs(row):
            before = _context(row, start)
            continued = [*rows[-1], *row[end:start]] if rows else []
            if rows and self._ids_of_row(continued) == self._ids_of_row(before):
                rows[-1] = continued
            else:
                rows.append(before)
            rows[-1] += row[start:stop]
            end = stop
        rows[-1] += row[end:]
        for one in rows[:-1]:
            start, _ = _trained_runs(one)[-1]
            one[start:] = [replace(s, answer=True) for s in one[start:]]
        plain = [[replace(s, images=()) for s in one] for one in rows]  # `_assemble` fills in the ids of images
        made = [[self._control.ids_of([s], begins_row=not at) for at, s in enumerate(one)] for one in plain]
        return list(zip(rows, made, strict=True))

    def _ids_of_row(self, row: Sequence[Segment]) -> list[int]:
        return self._control.ids_of(row, begins_row=True)

    def _plan(self, example: TextExample | ChatExample | PromptExample) -> list[list[Segment]]:
        """The segments of each row that the example becomes. Raises RenderError."""
        if isinstance(example, ChatExample):
            _refuse_excluded(example.messages, self.train_on)
            try:
                return self.renderer.render(
                    example.messages, example.tools, example.context, self.train_on, example.variables
                )
            except UnopenedError:
                if not example.is_question:
                    raise
            return [self._question(example)]
        if isinstance(example, TextExample):
            return [self._plain(example)]
        if isinstance(example.prompt, tuple):
            return [self.renderer.render_prompt(example.prompt, example.tools, example.variables)]
        self._note_special_tokens(example.prompt)
        return [[Segment(example.prompt, is_trained=False)]]

    def _question(self, example: ChatExample) -> list[Segment]:
        """The prompt, and the text of the right answer apart from it. Raises RenderError."""
        self._text_notes.add(
            "the chat template opens a completion in another way than it renders one, so expected answers are compared "
            "by their text, and their loss is not measured"
        )
        *prompt, answer = example.messages
        segments = self.renderer.render_prompt(prompt, example.tools, example.variables)
        return [*segments, Segment(str(answer["content"]), is_trained=False, answer=True)]

    def _note_special_tokens(self, text: str) -> None:
        if self._control.special.search(text):
            self._text_notes.add("texts contain special tokens; they are encoded as special tokens")

    def _plain(self, example: TextExample) -> list[Segment]:
        if example.segments:
            return [Segment(text, label) for text, label in example.segments]
        self._note_special_tokens(f"{example.prompt or ''}\n{example.completion}")
        if example.prompt is None:
            if self.train_on == "last":
                raise DataError(f"chat.train_on=last: {example.place} is plain text without turns; type assistant")
            return [Segment(example.completion, is_trained=True)]
        return [
            Segment(example.prompt, self.train_on == "all"),
            Segment(example.completion, is_trained=True, answer=True),
        ]

    def _tokens(self, texts: Sequence[tuple[str, bool, bool]]) -> list[list[int]]:
        """Ids of each (text, continues a row, is literal), each distinct text once, all in one call."""
        known = [text for text in dict.fromkeys(texts) if not text[2]]
        ids = {text: self._control.literal_ids(text[0]) for text in dict.fromkeys(texts) if text[2]}
        if known:
            anchor, ids_of_anchor = self._control.anchor
            full = [anchor + text if goes_on else text for text, goes_on, _ in known]
            options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            cut = len(ids_of_anchor)
            rows = self.tokenizer(full, **options)["input_ids"]
            ids |= {key: row[cut:] if key[1] else row for key, row in zip(known, rows, strict=True)}
        return [ids[key] for key in texts]

    def _start(self, part: Sequence[int]) -> list[int]:
        """What the tokenizer puts before a plain text, unless it is written there."""
        return [] if list(part[:1]) == self._bos[:1] else self._bos

    def _assemble(
        self,
        example: TextExample | ChatExample | PromptExample,
        segments: Sequence[Segment],
        parts: Sequence[list[int]],
    ) -> EncodedExample:
        ids, loss_mask, answer = list[int](), list[int](), (0, 0)
        is_plain = isinstance(example, TextExample) and not example.segments
        if is_plain or (isinstance(example, PromptExample) and isinstance(example.prompt, str)):
            ids = list(self._start(parts[0]))
            loss_mask = [int(segments[0].is_trained)] * len(ids)
        for segment, part in zip(segments, parts, strict=True):
            if segment.answer:
                answer = (answer[0] if answer[1] else len(ids), len(ids) + len(part))
            ids += self._control.with_images(segment, part)
            loss_mask += [int(segment.is_trained)] * len(part)
        if is_plain:
            ids, loss_mask, answer = self._append_eos(ids, loss_mask, answer)
        elif answer[1] and any(loss_mask):
            self._note_end(ids[answer[0] : answer[1]])
        loss_mask[:1] = [0] * len(loss_mask[:1])
        loss_mask = [trained and int(one < MEDIA_ID) for one, trained in zip(ids, loss_mask, strict=True)]
        return EncodedExample(example.place, ids, loss_mask, answer)

    def _append_eos(
        self, ids: list[int], loss_mask: list[int], answer: tuple[int, int]
    ) -> tuple[list[int], list[int], tuple[int, int]]:
        """With the end-of-sequence token as a trained token, so that the model learns to stop."""
        if self._eos is None:
            self.notes.add("the tokenizer has no end-of-sequence token, so the end of a text is not trained")
            return ids, loss_mask, answer
        if ids[-1:] == [self._eos]:
            return ids, loss_mask, answer
        return [*ids, self._eos], [*loss_mask, 1], (answer[0], answer[1] + 1) if answer[1] else answer

    def _note_end(self, ids: Sequence[int]) -> None:
        if ids and not self._control.special.fullmatch(str(self.tokenizer.convert_ids_to_tokens(ids[-1]))):
            self.notes.add(
                "the chat template ends an assistant turn without a special token, so its end is not trained"
            )


def _refuse_excluded(messages: Sequence[Message], train_on: TrainOn) -> None:
    """Raise RenderError for a message that says it is not trained on, where train_on says that it is."""
    turns = [m for m in messages if m["role"] == "assistant"][-1:] if train_on == "last" else messages
    flags = [flag for message in turns for flag in excluding_flags(message)] if train_on in ("last", "all") else []
    if flags:
        raise RenderError(f"a message has {flags[0]}, but chat.train_on={train_on}", "type chat.train_on=assistant")


def _trained_runs(row: Sequence[Segment]) -> list[tuple[int, int]]:
    """Half-open spans of trained turns and their reasoning; blanks before a turn's end token belong to it."""
    found: list[tuple[int, int]] = []
    for at in (at for at, segment in enumerate(row) if segment.is_trained or segment.is_reasoning):
        if found and not "".join(s.text for s in row[found[-1][1] : at]).strip():
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return found


def _context(row: Sequence[Segment], stop: int) -> list[Segment]:
    """The first `stop` segments as generation sees them: as one text."""
    return merge_neighbors([replace(s, is_trained=False, answer=False, is_reasoning=False) for s in row[:stop]])


def bos_and_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int | None]:
    """(what the tokenizer puts before a plain text by itself, its end-of-sequence id)."""
    whole = list(tokenizer("a", verbose=False)["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    eos = tokenizer.eos_token_id
    return (whole[: starts[0]] if starts else []), (eos if isinstance(eos, int) else None)


@dataclass(frozen=True, slots=True)
class EncodedAnswers:
    """A tokenized prompt with its answers (none, one or two), and what is known of them (JSON-able)."""

    place: SourceLocation
    prompt: list[int]
    answers: list[list[int]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What is stored of it."""
        return {
            "prompt": self.prompt,
            "answers": self.answers,
            "facts": json.dumps(self.facts, allow_nan=False, default=str),
        }


def _combine(
    example: Example, rows: Sequence[EncodedExample | EncodedRows]
) -> EncodedExample | EncodedRows | EncodedAnswers:
    """The item of an example: its row, or its prompt with the answers."""
    known = [row for row in rows if isinstance(row, EncodedExample)]
    if isinstance(example, PromptExample):
        messages = example.prompt if isinstance(example.prompt, tuple) else None
        facts = {"messages": messages, "columns": example.columns}
        return EncodedAnswers(example.place, known[0].ids, [], facts)
    if isinstance(example, AnswersExample):
        prompt = known[0].ids[: known[0].answer[0]]
        apart = {} if any(known[0].loss_mask) else {"is_apart": True}
        answers = [row.ids[slice(*row.answer)] for row in known]
        return EncodedAnswers(example.place, prompt, answers, {**example.facts, **apart})
    return rows[0]


def _with_locations(message: Message, reader: ImageReader) -> dict[str, Any]:
    if not (images := image_parts(message)):
        return dict(message)
    content = [
        {**part, "image": reader.location(part["image"])} if part in images else part for part in message["content"]
    ]
    return {**message, "content": content}


def digest(*parts: Any) -> str:
    """sha256 of plain values."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of all that can change a tokenizer's ids: algorithm, vocabulary, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    algorithm: Any = (
        json.loads(backend.to_str()) if backend is not None else [type(tokenizer).__name__, tokenizer.get_vocab()]
    )
    if backend is not None:  # left by whoever used the tokenizer last; every call sets them again
        algorithm.update(truncation=None, padding=None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest(algorithm, special, tokenizer.chat_template, bos_and_eos(tokenizer))
