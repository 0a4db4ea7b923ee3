"""Examples to tokens: ids, which of them are learnt, and where the last answer stands; and the digest of what they
depend on.

    Chat    ──chat.segments──▶ text, learnt?  ──┐
    Plain   ─────────────────▶ text, learnt?  ──┴─ one batch call ──▶ Encoded
    Ask     ──the very first segment of these ─── one batch call ──▶ ids ──▶ Answered
    Answers ──each answer with the prompt──▶ ids ──cut where the answer begins──▶ Answered

What is learnt follows from the segment a token came from, never from its value: an end-of-sequence token is
learnt although it may also be the padding token. The first token of a row is never learnt: nothing predicts it.
A prompt and its answer are the very tokens that sft has for them, without the blanks after the end token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.core.errors import DataError
from runner.data.chat import ChatTemplate, Learnt, NotPrefixStable, Segment
from runner.data.examples import AnswersExample, ChatExample, Example, PromptExample, TextExample, is_learnt
from runner.data.readers import Problems, SourceLocation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 2  # raise it when the same rows give other tokens, so that no old cache is used
UNSTABLE = (
    "the chat template writes an assistant turn in another way once the conversation goes on (some drop earlier "
    "thinking), and has no {% generation %} marks, so its turns cannot be told apart"
)
UNOPENED = (
    "the chat template opens an answer (with its generation prompt) in another way than it writes one, "
    "so prompt and answer cannot be told apart"
)


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """A tokenised example; `answer` is the half-open span of the last assistant turn, (0, 0) if there is none."""

    place: SourceLocation
    ids: list[int]
    learnt: list[int]  # 1 = learnt, 0 = context
    answer: tuple[int, int] = (0, 0)

    def record(self) -> dict[str, Any]:
        """What is stored of it."""
        return {"ids": self.ids, "learnt": self.learnt, "first": self.answer[0], "last": self.answer[1]}


class ExampleTokenizer:
    """A tokenizer with the choices that turn examples into tokens; `notes` says what was noticed on the way."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: Learnt = "assistant") -> None:
        self.tokenizer = tokenizer
        self.loss_on: Learnt = loss_on
        self.notes: set[str] = set()
        self._template: ChatTemplate | None = None
        self._bos, self._eos = bos_and_eos(tokenizer)
        self._anchor = _anchor(tokenizer)
        self._special = {
            *tokenizer.all_special_ids,
            *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special),
        }

    def encode_examples(
        self, examples: Sequence[TextExample | ChatExample], problems: Problems
    ) -> list[EncodedExample]:
        """Tokens of each example in order; one that cannot be encoded goes to `problems`. Raises DataError."""
        return [row for row in self.encode_each(examples, problems) if row is not None]

    def encode_each(
        self, examples: Sequence[TextExample | ChatExample], problems: Problems
    ) -> list[EncodedExample | None]:
        """As `encode`, with None for each example that cannot be encoded; several of one row are one problem."""
        plans: list[list[Segment] | EncodedExample | None] = []
        failed: set[SourceLocation] = set()
        for example in examples:
            try:
                plans.append(self._plan(example))
            except NotPrefixStable:
                plans.append(None)
                failed.add(example.place)
        for place in sorted(failed, key=lambda p: p.number):
            problems.add_fault(place, UNOPENED if self.loss_on == "completion" else UNSTABLE, self._remedy())
        parts = iter(self._tokens([s for plan in plans if isinstance(plan, list) for s in _continuation_flags(plan)]))
        return [
            self._assemble(example, plan, [next(parts) for _ in plan]) if isinstance(plan, list) else plan
            for example, plan in zip(examples, plans, strict=True)
        ]

    def encode_prompts(self, asks: Sequence[PromptExample]) -> list[list[int]]:
        """What generation sees of each prompt; what `encode` puts before an answer to it. Raises DataError."""
        plain = [isinstance(ask.prompt, str) for ask in asks]
        parts = self._tokens([(self._prompt_text(ask), False) for ask in asks])
        return [[*self._start(part), *part] if p else part for p, part in zip(plain, parts, strict=True)]

    def _prompt_text(self, ask: PromptExample) -> str:
        if isinstance(ask.prompt, str):
            return ask.prompt
        return self._chat_template().render(
            ChatExample(ask.place, ask.prompt, tools=ask.tools), ask.prompt, prompt=True
        )

    def _plan(self, example: TextExample | ChatExample) -> list[Segment] | EncodedExample:
        if isinstance(example, TextExample):
            return self._plain(example)
        template = self._chat_template()
        try:
            return template.segments(example, self.loss_on)
        except NotPrefixStable:
            return self._by_marks(template, example)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer)
        return self._template

    def _plain(self, example: TextExample) -> list[Segment]:
        if example.prompt is None:
            if self.loss_on == "last_assistant":
                raise DataError(
                    f"data.loss_on=last_assistant: {example.place} is plain text without turns; use assistant or all"
                )
            return [Segment(example.completion, learnt=True)]
        return [Segment(example.prompt, self.loss_on == "all"), Segment(example.completion, learnt=True, answer=True)]

    def _by_marks(self, template: ChatTemplate, chat: ChatExample) -> EncodedExample:
        """The template's own marks say where the assistant speaks; they know nothing of a prompt's turns.

        The last turn is an answer to ask for only if generation would see the very ids that stand before it.
        """
        whole = self.loss_on == "assistant" and not chat.context and all(map(is_learnt, chat.messages))
        marked = template.ids_and_mask(chat) if whole else None
        if marked is None:
            raise NotPrefixStable
        ids, mask = marked
        mask[0] = 0
        first, last = _last_span(mask)
        self._note_end(ids[first:last])
        turn = max(i for i, m in enumerate(chat.messages) if m["role"] == "assistant")
        [asked] = self._tokens([(template.render(chat, chat.messages[:turn], prompt=True), False)])
        return EncodedExample(chat.place, ids, mask, (first, last) if ids[:first] == asked else (0, 0))

    def _remedy(self) -> str:
        if self.loss_on == "assistant":
            return "set data.loss_on=last_assistant: the last turn alone is learnt"
        return "use another chat template, or give the prompt and what answers it as plain text"

    def _tokens(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Ids of each (text, whether it continues a row), each distinct text tokenised once, all in one call."""
        known = list(dict.fromkeys(texts))
        if not known:
            return []
        anchor, ids_of_anchor = self._anchor
        full = [anchor + text if goes_on else text for text, goes_on in known]
        found = self.tokenizer(full, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        cut = len(ids_of_anchor)
        ids = {key: row[cut:] if key[1] else row for key, row in zip(known, found, strict=True)}
        return [ids[key] for key in texts]

    def _start(self, part: Sequence[int]) -> list[int]:
        """What the tokenizer puts before a plain text, unless it is written there."""
        return [] if list(part[:1]) == self._bos[:1] else self._bos

    def _assemble(
        self, example: TextExample | ChatExample, segments: Sequence[Segment], parts: Sequence[list[int]]
    ) -> EncodedExample:
        ids, learnt, answer = list[int](), list[int](), (0, 0)
        if isinstance(example, TextExample):
            ids = list(self._start(parts[0]))
            learnt = [int(segments[0].learnt)] * len(ids)
        for segment, part in zip(segments, parts, strict=True):
            if segment.answer:
                answer = (len(ids), len(ids) + len(part))
            ids += part
            learnt += [int(segment.learnt)] * len(part)
        if isinstance(example, TextExample):
            ids, learnt, answer = self._append_eos(ids, learnt, answer)
        elif segments and answer[1]:
            self._note_end(ids[answer[0] : answer[1]])
        learnt[:1] = [0] * len(learnt[:1])
        return EncodedExample(example.place, ids, learnt, answer)

    def _append_eos(
        self, ids: list[int], learnt: list[int], answer: tuple[int, int]
    ) -> tuple[list[int], list[int], tuple[int, int]]:
        """With the end-of-sequence token as a learnt token, so that the model learns to stop."""
        if self._eos is None:
            self.notes.add("the tokenizer has no end-of-sequence token: where a text ends is not learnt")
            return ids, learnt, answer
        if ids[-1:] == [self._eos]:
            return ids, learnt, answer
        return [*ids, self._eos], [*learnt, 1], (answer[0], answer[1] + 1) if answer[1] else answer

    def _note_end(self, ids: Sequence[int]) -> None:
        if ids and ids[-1] not in self._special:
            self.notes.add(
                "the chat template ends an assistant turn without a special token: where it ends is not learnt"
            )


def bos_and_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int | None]:
    """(what the tokenizer puts before a plain text by itself, its end-of-sequence id)."""
    whole = list(tokenizer("a", verbose=False)["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    eos = tokenizer.eos_token_id
    return (whole[: starts[0]] if starts else []), (eos if isinstance(eos, int) else None)


def _anchor(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """A text to put before a segment that goes on, and the ids to take off again.

    Empty for most. Some SentencePiece tokenizers put a space before every text they are given; behind a line
    break they do not, so that the segments join without a space that nobody wrote.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    if tokenizer.decode(ids("a") + ids("b")) == "ab":
        return "", []
    start = ids("\n")
    joined = ids("\nb")
    works = joined[: len(start)] == start and tokenizer.decode(ids("a") + joined[len(start) :]) == "ab"
    return ("\n", start) if works else ("", [])


def _continuation_flags(segments: Sequence[Segment]) -> list[tuple[str, bool]]:
    return [(segment.text, at > 0) for at, segment in enumerate(segments)]


def _last_span(mask: Sequence[int]) -> tuple[int, int]:
    """The last stretch of ones, half-open."""
    stop = max((i + 1 for i, m in enumerate(mask) if m), default=0)
    start = stop
    while start and mask[start - 1]:
        start -= 1
    return start, stop


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
) -> list[EncodedExample | EncodedAnswers]:
    """Tokens of each example; those of one source are all of one type, so that their order stays.

    One that cannot be encoded goes to `problems`. Raises DataError.
    """
    single = [e for e in examples if isinstance(e, TextExample | ChatExample)]
    asks = [e for e in examples if isinstance(e, PromptExample)]
    answers = [e for e in examples if isinstance(e, AnswersExample)]
    return [
        *tokeniser.encode_examples(single, problems),
        *encode_prompts(tokeniser, asks),
        *encode_answers(tokeniser, answers, problems),
    ]


def encode_prompts(tokeniser: ExampleTokenizer, asks: Sequence[PromptExample]) -> list[EncodedAnswers]:
    """Each prompt alone, with its conversation and its other columns. Raises DataError."""
    facts = [{"messages": a.prompt if isinstance(a.prompt, tuple) else None, "columns": a.columns} for a in asks]
    return [
        EncodedAnswers(ask.place, prompt, [], known)
        for ask, prompt, known in zip(asks, tokeniser.encode_prompts(asks), facts, strict=True)
    ]


def encode_answers(
    tokeniser: ExampleTokenizer, rows: Sequence[AnswersExample], problems: Problems
) -> list[EncodedAnswers]:
    """Each prompt with its answers; a row of which one cannot be encoded goes to `problems`. Raises DataError."""
    flat = iter(tokeniser.encode_each([answer for row in rows for answer in row.answers], problems))
    found = []
    for row in rows:
        each = [answer for answer in [next(flat) for _ in row.answers] if answer is not None]
        if len(each) == len(row.answers):
            prompt = each[0].ids[: each[0].answer[0]]
            found.append(EncodedAnswers(row.place, prompt, [e.ids[slice(*e.answer)] for e in each], row.facts))
    return found


def digest(*parts: Any) -> str:
    """sha256 of plain values."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of all of a tokenizer that can change the ids: its algorithm, vocabulary, special tokens and template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    algorithm: Any = (
        json.loads(backend.to_str()) if backend is not None else [type(tokenizer).__name__, tokenizer.get_vocab()]
    )
    if backend is not None:  # left by whoever used the tokenizer last; every call sets them anew
        algorithm.update(truncation=None, padding=None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest(algorithm, special, tokenizer.chat_template, bos_and_eos(tokenizer))
