"""Examples to tokens: ids, loss mask, span of the last answer; and the digest of what they depend on.

    Chat    ──Renderer.render──▶ rows of (text, trained on?)  ──┐
    Plain   ───────────────────▶ one row of them              ──┴─ one batch call ──▶ EncodedExample | EncodedRows
    Answers ──each answer with the prompt──▶ ids ──cut where the answer begins──▶ EncodedAnswers

What is trained on follows from the segment a token came from, never from its value: an end-of-sequence token is
trained on although it may also be the padding token. The first token of a row is never trained on: nothing predicts it.
A prompt and its answer are the very tokens that sft has for them, without the blanks after the end token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runner.core.errors import DataError
from runner.data.chat import Renderer, RenderError, RenderTimeout, TrainOn
from runner.data.config import ChatConfig
from runner.data.control_tokens import Segment, common_length, join_anchor
from runner.data.examples import AnswersExample, ChatExample, Example, PromptExample, TextExample
from runner.data.readers import Problems, SourceLocation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 3  # raise it when the same rows give other tokens, so that no old cache is used


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
    shared = min(common_length(rows[0].ids, row.ids) for row in rows)
    shared = min(shared, *(row.loss_mask.index(1) for row in rows))
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
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig | None = None, train_on: TrainOn | None = None
    ) -> None:
        self.tokenizer, self.chat = tokenizer, chat or ChatConfig()
        self.train_on: TrainOn = train_on or self.chat.train_on
        self.notes: set[str] = set()
        self._text_notes: set[str] = set()
        self._bos, self._eos = bos_and_eos(tokenizer)
        self._anchor = join_anchor(tokenizer)
        self._special_texts = {str(token) for token in tokenizer.all_special_tokens}
        self._special = {
            *tokenizer.all_special_ids,
            *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special),
        }

    @cached_property
    def renderer(self) -> Renderer:
        """The chat template. Raises DataError if there is none."""
        return Renderer(self.tokenizer, self.chat)

    @property
    def chat_notes(self) -> set[str]:
        """What was noticed of control tokens in conversations and texts, and of lost reasoning."""
        return self._text_notes | (self.renderer.notes if "renderer" in self.__dict__ else set())

    def encode_examples(
        self, examples: Sequence[TextExample | ChatExample], problems: Problems
    ) -> list[EncodedExample | EncodedRows]:
        """Tokens of each example in order; one that cannot be encoded goes to `problems`. Raises DataError."""
        return [row for row in self.encode_each(examples, problems) if row is not None]

    def encode_each(
        self, examples: Sequence[TextExample | ChatExample], problems: Problems
    ) -> list[EncodedExample | EncodedRows | None]:
        """As `encode`, with None for each example that cannot be encoded; several of one row are one problem."""
        plans: list[list[list[Segment]]] = []
        failed: dict[SourceLocation, RenderError] = {}
        for example in examples:
            try:
                plans.append(self._plan(example))
            except RenderTimeout as error:
                raise _timeout_error(example.place, error) from error
            except RenderError as error:
                plans.append([])
                failed.setdefault(example.place, error)
        for place, fault in failed.items():
            problems.add_fault(place, str(fault), fault.hint)
        parts = iter(self._tokens([s for plan in plans for row in plan for s in _continuation_flags(row)]))
        made = [
            [self._assemble(example, row, [next(parts) for _ in row]) for row in plan]
            for example, plan in zip(examples, plans, strict=True)
        ]
        return [(rows[0] if len(rows) == 1 else EncodedRows(rows)) if rows else None for rows in made]

    def encode_prompts(self, asks: Sequence[PromptExample], problems: Problems) -> list[list[int] | None]:
        """The ids of each prompt as generation sees them; None and a problem where it cannot be written.

        Raises DataError.
        """
        plans: list[list[Segment] | None] = []
        for ask in asks:
            try:
                plans.append(self._prompt_plan(ask))
            except RenderTimeout as error:
                raise _timeout_error(ask.place, error) from error
            except RenderError as error:
                plans.append(None)
                problems.add_fault(ask.place, str(error), error.hint)
        parts = iter(self._tokens([flag for plan in plans if plan for flag in _continuation_flags(plan)]))
        rows = [plan if plan is None else [i for _ in plan for i in next(parts)] for plan in plans]
        return [
            [*self._start(ids), *ids] if ids is not None and isinstance(ask.prompt, str) else ids
            for ask, ids in zip(asks, rows, strict=True)
        ]

    def _prompt_plan(self, ask: PromptExample) -> list[Segment]:
        if isinstance(ask.prompt, str):
            self._note_special_tokens(ask.prompt)
            return [Segment(ask.prompt, is_trained=False)]
        return self.renderer.render_prompt(ask.prompt, ask.tools)

    def _plan(self, example: TextExample | ChatExample) -> list[list[Segment]]:
        if isinstance(example, TextExample):
            return [self._plain(example)]
        return self.renderer.render(example.messages, example.tools, example.context, self.train_on)

    def _note_special_tokens(self, text: str) -> None:
        if any(token in text for token in self._special_texts):
            self._text_notes.add("texts contain special tokens; they are encoded as special tokens")

    def _plain(self, example: TextExample) -> list[Segment]:
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
        ids = {text: self.renderer.control.literal_ids(text[0]) for text in dict.fromkeys(texts) if text[2]}
        if known:
            anchor, ids_of_anchor = self._anchor
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
        self, example: TextExample | ChatExample, segments: Sequence[Segment], parts: Sequence[list[int]]
    ) -> EncodedExample:
        ids, loss_mask, answer = list[int](), list[int](), (0, 0)
        if isinstance(example, TextExample):
            ids = list(self._start(parts[0]))
            loss_mask = [int(segments[0].is_trained)] * len(ids)
        for segment, part in zip(segments, parts, strict=True):
            if segment.answer:
                answer = (answer[0] if answer[1] else len(ids), len(ids) + len(part))
            ids += part
            loss_mask += [int(segment.is_trained)] * len(part)
        if isinstance(example, TextExample):
            ids, loss_mask, answer = self._append_eos(ids, loss_mask, answer)
        elif segments and answer[1]:
            self._note_end(ids[answer[0] : answer[1]])
        loss_mask[:1] = [0] * len(loss_mask[:1])
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
        if ids and ids[-1] not in self._special:
            self.notes.add(
                "the chat template ends an assistant turn without a special token, so its end is not trained"
            )


def bos_and_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int | None]:
    """(what the tokenizer puts before a plain text by itself, its end-of-sequence id)."""
    whole = list(tokenizer("a", verbose=False)["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    eos = tokenizer.eos_token_id
    return (whole[: starts[0]] if starts else []), (eos if isinstance(eos, int) else None)


def _timeout_error(place: SourceLocation, error: RenderTimeout) -> DataError:
    """Of the first row: a deadline for each row would be hours for all."""
    return DataError(f"{place}: {error}; set chat.template=FILE to a template that ends")


def _continuation_flags(segments: Sequence[Segment]) -> list[tuple[str, bool, bool]]:
    return [(segment.text, at > 0, segment.literal) for at, segment in enumerate(segments)]


@dataclass(frozen=True, slots=True)
class EncodedAnswers:
    """A tokenised prompt with its answers (none, one or two), and what is known of them (JSON-able)."""

    place: SourceLocation
    prompt: list[int]
    answers: list[list[int]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What is stored of it."""
        return {"prompt": self.prompt, "answers": self.answers, "facts": json.dumps(self.facts, allow_nan=False)}


def encode(
    tokeniser: ExampleTokenizer, examples: Sequence[Example], problems: Problems
) -> list[EncodedExample | EncodedRows | EncodedAnswers]:
    """Tokens of each example; those of one source are all of one type, so that their order stays.

    One that cannot be encoded goes to `problems`. Raises DataError.
    """
    single = [e for e in examples if isinstance(e, TextExample | ChatExample)]
    asks = [e for e in examples if isinstance(e, PromptExample)]
    answers = [e for e in examples if isinstance(e, AnswersExample)]
    return [
        *tokeniser.encode_examples(single, problems),
        *encode_prompts(tokeniser, asks, problems),
        *encode_answers(tokeniser, answers, problems),
    ]


def encode_prompts(
    tokeniser: ExampleTokenizer, asks: Sequence[PromptExample], problems: Problems
) -> list[EncodedAnswers]:
    """Each prompt alone, with its conversation and columns; problems are collected in `problems`."""
    facts = [{"messages": a.prompt if isinstance(a.prompt, tuple) else None, "columns": a.columns} for a in asks]
    return [
        EncodedAnswers(ask.place, prompt, [], known)
        for ask, prompt, known in zip(asks, tokeniser.encode_prompts(asks, problems), facts, strict=True)
        if prompt is not None
    ]


def encode_answers(
    tokeniser: ExampleTokenizer, rows: Sequence[AnswersExample], problems: Problems
) -> list[EncodedAnswers]:
    """Each prompt with its answers; a row that fails is collected in `problems`. Raises DataError."""
    flat = iter(tokeniser.encode_each([answer for row in rows for answer in row.answers], problems))
    found = []
    for row in rows:
        each = [answer for answer in [next(flat) for _ in row.answers] if isinstance(answer, EncodedExample)]
        if len(each) == len(row.answers):
            prompt = each[0].ids[: each[0].answer[0]]
            found.append(EncodedAnswers(row.place, prompt, [e.ids[slice(*e.answer)] for e in each], row.facts))
    return found


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
