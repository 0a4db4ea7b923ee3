"""Tokens to training items and held-out questions, with data.truncation applied and counted.

sft      ids, loss_mask     ─▶ TokenizedExample    (held out: EvalQuestion)
pairs    prompt, 2 answers  ─▶ PreferencePair
judged   prompt, answer     ─▶ LabeledCompletion
prompts  prompt             ─▶ Prompt              (held out, with the answer: EvalQuestion)

data.truncation
error            a problem that names row and length
skip             left out
truncate_left    the last max_length tokens stay, after BOS        truncate_right    the first ones stay
split            pieces of max_length tokens, each beginning with the last token of the one before it,
                 which is context there: every token but the first is trained on exactly once

Of a prompt with answers, the length is that of the prompt and its longest answer, and only the prompt is cut, on its
left: an answer without its end would teach a model not to stop. A prompt that is to be answered is measured alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from runner.core.completion_text import completion_text
from runner.core.media import whole_images, without_media
from runner.data.examples import Reading
from runner.data.readers import Problems
from runner.data.tokenization import EncodedAnswers, EncodedExample, EncodedRows, share_prefix
from runner.interfaces import EvalQuestion, LabeledCompletion, PreferencePair, Prompt, TokenizedExample
from runner.interfaces.media import ImageReader
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OverlongRule = Literal["error", "skip", "truncate_left", "truncate_right", "split"]


@dataclass(slots=True)
class TruncationCounts:
    """Counts over one source; tokens are those of the items that stay."""

    rows: int = 0
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0  # tokens of the longest row before anything was cut
    longest_item: int = 0  # the same of the items that stay
    overlong: int = 0
    cut_tokens: int = 0
    left_out: int = 0  # rows skipped, or cut so far that nothing to learn was left
    branched: int = 0  # rows whose turns are trained on under different contexts
    plain_tokens: int = 0  # of these rows, each conversation once
    branched_tokens: int = 0  # of these rows as they are trained on

    def __str__(self) -> str:
        trained = f", {self.trained_tokens} of them trained on" if self.trained_tokens else ""
        return f"{self.items} items, {self.tokens} tokens{trained}; longest sequence {self.longest}"

    def branches_text(self) -> str:
        """What training on every turn under its own context costs; empty where no template rewrites history."""
        if not self.branched:
            return ""
        times = self.branched_tokens / self.plain_tokens
        why = "generation sees other tokens of earlier turns, so each turn is a sequence with the context of generation"
        return f"{self.branched} of {self.rows} rows: {why}; {times:.2g} times their tokens (chat.train_on=last: once)"

    def add(self, other: TruncationCounts) -> None:
        """Count what another one has counted."""
        for name in (one.name for one in fields(self)):
            combine = max if name in ("longest", "longest_item") else int.__add__
            setattr(self, name, combine(getattr(self, name), getattr(other, name)))

    def count_row(self, length: int) -> None:
        """Count a row of `length` tokens."""
        self.rows += 1
        self.longest = max(self.longest, length)

    def count_item(self, length: int, tokens: int, trained: int) -> None:
        """Count an item that stays; its `length` leaves out all answers but the longest."""
        self.items += 1
        self.longest_item = max(self.longest_item, length)
        self.tokens += tokens
        self.trained_tokens += trained


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The longest item in tokens, and the rule for longer ones.

    max_length: None = `model_limit`: the most tokens that the model allows, and why; None = any
    starts: ids that a sequence begins with, such as BOS, which truncate_left keeps
    images: knows how many tokens each image takes; None for a model of text alone
    """

    max_length: int | None
    rule: OverlongRule
    reading: Reading = "sft"
    model_limit: tuple[int, str] | None = None
    starts: frozenset[int] = frozenset()
    images: ImageReader | None = None

    @property
    def most(self) -> int:
        """Tokens of the longest item."""
        return self.max_length or (self.model_limit[0] if self.model_limit else sys.maxsize)

    def __str__(self) -> str:
        own = f"data.max_length={self.max_length}"
        return (
            own if self.max_length or not self.model_limit else f"{self.most} (data.max_length: {self.model_limit[1]})"
        )

    def apply(
        self, row: EncodedExample | EncodedRows | EncodedAnswers, tally: TruncationCounts, problems: Problems
    ) -> Iterator[EncodedExample | EncodedAnswers]:
        """The items that a row of data becomes: one, none, or several; faults go to `problems`."""
        if isinstance(row, EncodedRows):
            yield from self._apply_to_rows(row, tally, problems)
            return
        length = self._length(row)
        tally.count_row(length)
        if _is_empty(row):
            problems.add_fault(
                row.place, f"no token to train on in the {length} tokens of this row; expected at least one"
            )
        elif length <= self.most:
            yield self._count_item(row, tally)
        elif self.rule == "error":
            tally.overlong += 1
            problems.add_fault(row.place, f"{length} tokens, above {self}")
        else:
            yield from self._truncate(row, length, tally)

    def _apply_to_rows(
        self, example: EncodedRows, tally: TruncationCounts, problems: Problems
    ) -> Iterator[EncodedExample]:
        """Items of several rows that share their beginning, each item of at most max_length tokens."""
        alone, faults = TruncationCounts(), Problems(problems.key, problems.source)
        rows = [r for row in example.rows for r in self.apply(row, alone, faults) if isinstance(r, EncodedExample)]
        if self.rule == "error" and alone.overlong:  # one fault for a row of data, however many branches it has
            problems.add_fault(example.place, f"{alone.longest} tokens, above {self}")
        else:
            problems.extend(faults)
        if self.rule == "skip" and alone.overlong:  # the whole row, and not its long branches alone
            rows = []
        tally.count_row(alone.longest)
        tally.overlong += alone.overlong > 0
        tally.left_out += alone.overlong > 0 and not rows
        tally.cut_tokens += sum(max(len(row.ids) - self.most, 0) for row in example.rows) if rows else 0
        if not rows:
            return
        tally.branched += 1
        tally.plain_tokens += len(example.rows[-1].ids)
        groups: list[list[EncodedExample]] = []
        items: list[EncodedExample] = []
        for row in rows:
            joined = share_prefix([*groups[-1], row]) if groups else None
            if joined is not None and len(joined.ids) <= self.most:
                groups[-1].append(row)
                items[-1] = joined
            else:
                groups.append([row])
                items.append(row)
        for item in items:
            tally.branched_tokens += len(item.ids)
            self._count_item(item, tally)
            yield item

    def _length(self, row: EncodedExample | EncodedAnswers) -> int:
        if isinstance(row, EncodedExample):
            return len(row.ids)
        alone = self.reading in ("prompts", "questions")
        return len(row.prompt) + (0 if alone else max(map(len, row.answers), default=0))

    def _truncate(
        self, row: EncodedExample | EncodedAnswers, length: int, tally: TruncationCounts
    ) -> Iterator[EncodedExample | EncodedAnswers]:
        tally.overlong += 1
        pieces = [] if self.rule == "skip" else self._pieces(row, length)
        tally.left_out += not pieces
        if pieces and self.rule != "split":
            tally.cut_tokens += length - self.most
        for piece in pieces:
            yield self._count_item(piece, tally)

    def _count_item(
        self, row: EncodedExample | EncodedAnswers, tally: TruncationCounts
    ) -> EncodedExample | EncodedAnswers:
        if isinstance(row, EncodedExample):
            tally.count_item(self._length(row), len(row.ids), sum(row.loss_mask))
        else:
            trained = sum(map(len, row.answers))
            tally.count_item(self._length(row), len(row.prompt) + trained, trained)
        return row

    def _pieces(self, row: EncodedExample | EncodedAnswers, length: int) -> list[EncodedExample] | list[EncodedAnswers]:
        """What is left of the row, as far as anything is."""
        cut = length - self.most
        if isinstance(row, EncodedAnswers):
            start = self._start(row.prompt)
            begin = self._whole_images(row.prompt, cut + len(start), len(row.prompt))[0]
            rest = row.prompt[begin:]
            return [replace(row, prompt=start + rest)] if rest else []
        if self.rule == "truncate_right":
            pieces = [self._slice(row, 0, self.most)]
        elif self.rule == "truncate_left":
            start = self._start(row.ids)
            pieces = [_prepend(start, self._slice(row, cut + len(start), length))]
        else:
            pieces = [self._slice(row, at, at + self.most) for at in range(0, length - 1, self.most - 1)]
        return [piece for piece in pieces if any(piece.loss_mask)]

    def _slice(self, row: EncodedExample, start: int, stop: int) -> EncodedExample:
        """Tokens start … stop of a row, without parts of images; an answer without its prompt or end is none."""
        start, stop = self._whole_images(row.ids, start, stop)
        ids, loss_mask = row.ids[start:stop], row.loss_mask[start:stop]
        loss_mask[:1] = [0]
        first, last = row.answer
        whole = start < first and last <= stop
        return replace(row, ids=ids, loss_mask=loss_mask, answer=(first - start, last - start) if whole else (0, 0))

    def _whole_images(self, ids: Sequence[int], start: int, stop: int) -> tuple[int, int]:
        return whole_images(ids, start, stop, self.images.count) if self.images else (start, stop)

    def _start(self, ids: Sequence[int]) -> list[int]:
        """The ids that a sequence begins with and keeps."""
        return list(takewhile(self.starts.__contains__, ids))[: self.most - 1]

    def truncation_hint(self, tally: TruncationCounts) -> str:
        """What to type where rows are refused because of their length, counted to the end; empty if none is."""
        if self.rule != "error" or not tally.overlong:
            return ""
        cut = "skip, truncate_left or truncate_right (split: of plain text)"
        rules = cut if self.reading == "sft" else "skip or truncate_left (of the prompt)"
        rows = "1 row is" if tally.overlong == 1 else f"{tally.overlong} of {tally.rows} rows are"
        fits = self.model_limit is None or tally.longest <= self.model_limit[0]
        keep = f"data.max_length={tally.longest} to keep all, or " if fits else ""
        return f"{rows} too long; type {keep}data.truncation={rules}"

    def report(self, tally: TruncationCounts) -> str:
        """What the rule did, in words; empty if no row was too long."""
        if not tally.overlong:
            return ""
        done = {"skip": "left out", "split": "split"}.get(self.rule, f"truncated by {tally.cut_tokens} tokens in total")
        lost = "no token to train on remained" if self.reading == "sft" else "no prompt token remained"
        said = f", {tally.left_out} of them skipped, as {lost}" if self.rule != "skip" and tally.left_out else ""
        return f"{tally.overlong} of {tally.rows} rows were longer than {self}: {done}{said}"


def _is_empty(row: EncodedExample | EncodedAnswers) -> bool:
    """Whether there is nothing to learn, or nothing to answer."""
    return not any(row.loss_mask) if isinstance(row, EncodedExample) else not row.prompt or not all(row.answers)


def _prepend(start: list[int], row: EncodedExample) -> EncodedExample:
    """The row after ids that are context."""
    first, last = row.answer
    answer = (first + len(start), last + len(start)) if last else (0, 0)
    return replace(row, ids=start + row.ids, loss_mask=[0] * len(start) + row.loss_mask, answer=answer)


Record = Mapping[str, Any]
Make = Callable[[Record, "PreTrainedTokenizerBase"], Any]


def tokenized_example(record: Record) -> TokenizedExample:
    """The item of a tokenized row: weight 1 where it is trained on, 0 where it is context."""
    branches = tuple(record.get("branches") or ())
    return TokenizedExample(tuple(record["ids"]), tuple(map(float, record["loss_mask"])), branches)


def rollout_prompt(ids: Sequence[int], facts: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A prompt; its text is what the ids decode to, also where they were cut."""
    messages = facts["messages"]
    text = _prompt_text(ids, messages is not None, tokenizer)
    return Prompt(tuple(ids), text, messages and tuple(messages), facts["columns"])


def _prompt_text(ids: Sequence[int], is_chat: bool, tokenizer: PreTrainedTokenizerBase) -> str:
    """What ids decode to; of plain text without the BOS that the tokenizer put before it."""
    start = int(not is_chat and tokenizer.bos_token_id is not None and list(ids[:1]) == [tokenizer.bos_token_id])
    return str(tokenizer.decode(without_media(ids[start:])))


def eval_question(record: Record, tokenizer: PreTrainedTokenizerBase) -> EvalQuestion:
    """A held-out question: all before the last assistant turn, and the text of a perfect answer.

    Plain text, and a turn that was cut, have no span: then only the item is there, of which the loss can be measured.
    """
    ids, first, last = record["ids"], record["first"], record["last"]
    whole = tokenized_example(record)
    if not last:
        return EvalQuestion(whole)
    context = [*ids[: whole.branches[0]], *ids[whole.branches[-1] : first]] if whole.branches else ids[:first]
    start = first + record["loss_mask"][first:last].index(1)  # reasoning before it is not trained on, or compared
    return replace(_question(tokenizer, whole, context, ids[start:last]), follows_reasoning=start > first)


def eval_question_of_prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> EvalQuestion:
    """A held-out prompt with its answer, whose loss is measured where it follows the prompt."""
    facts, prompt, [answer] = json.loads(record["facts"]), record["prompt"], record["answers"]
    follows = [] if facts.get("is_apart") else answer
    whole = TokenizedExample((*prompt, *follows), (0.0,) * len(prompt) + (1.0,) * len(follows))
    messages = facts["messages"] and tuple(facts["messages"])
    found = _question(tokenizer, whole, prompt, answer)
    # A template writes other text around the messages; plain text decodes to itself, but for tokens such as BOS.
    asked = facts["messages"] or tokenizer.decode(without_media(prompt), skip_special_tokens=True)
    key = hashlib.sha256(json.dumps([asked, facts["columns"]], sort_keys=True, default=str).encode()).hexdigest()[:16]
    text = _prompt_text(prompt, messages is not None, tokenizer)
    return replace(found, prompt=text, messages=messages, columns=facts["columns"], key=key)


def _question(
    tokenizer: PreTrainedTokenizerBase, whole: TokenizedExample, prompt: Sequence[int], answer: Sequence[int]
) -> EvalQuestion:
    return EvalQuestion(
        item=whole,
        prompt_ids=tuple(prompt),
        prompt=str(tokenizer.decode(without_media(prompt))),
        answer=completion_text(tokenizer, answer),
        answer_ids=tuple(answer),
    )


# of prompts with answers: the item, the fact that is its label, and the number of answers
ANSWERS: Mapping[ItemKind, tuple[Callable[..., Any], str, int]] = {
    "pairs": (PreferencePair, "margin", 2),
    "judged": (LabeledCompletion, "good", 1),
}
# of the others, held-out items are kept
QUESTIONS: Mapping[ItemKind, Make] = {"sft": eval_question, "prompts": eval_question_of_prompt}
