"""Stored records to what the trainer sees: items to learn from, and held-out questions to ask.

sft      ids, learnt        ─▶ Item     (held out: Question)
pairs    prompt, 2 answers  ─▶ Pair     judged   prompt, answer ─▶ Judged
prompts  prompt             ─▶ Prompt   (held out, with the answer: Question)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.interfaces import Item, Judged, Pair, Prompt, Question
from runner.spec.base import ItemKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = Mapping[str, Any]
Make = Callable[[Record, "PreTrainedTokenizerBase"], Any]


def item(record: Record, tokenizer: PreTrainedTokenizerBase) -> Item:
    """The item of a tokenised row: weight 1 where it is learnt, 0 where it is context."""
    return Item(tuple(record["ids"]), tuple(map(float, record["learnt"])))


def pair(record: Record, tokenizer: PreTrainedTokenizerBase) -> Pair:
    """Two answers to one prompt."""
    chosen, rejected = map(tuple, record["answers"])
    return Pair(tuple(record["prompt"]), chosen, rejected, json.loads(record["facts"])["margin"])


def judged(record: Record, tokenizer: PreTrainedTokenizerBase) -> Judged:
    """One answer, and whether it is a good one."""
    return Judged(tuple(record["prompt"]), tuple(record["answers"][0]), json.loads(record["facts"])["good"])


def prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A prompt; its text is what the ids decode to, also where they were cut."""
    facts, ids = json.loads(record["facts"]), record["prompt"]
    messages = facts["messages"]
    return Prompt(tuple(ids), str(tokenizer.decode(ids)), messages and tuple(messages), facts["columns"])


def question(record: Record, tokenizer: PreTrainedTokenizerBase) -> Question:
    """What to ask and what to expect: all before the last assistant turn, and what a perfect answer decodes to.

    Plain text, and a turn that was cut, have no span: then only the item is there, of which the loss can be measured.
    """
    ids, first, last = record["ids"], record["first"], record["last"]
    whole = item(record, tokenizer)
    return _question(tokenizer, whole, ids[:first], ids[first:last]) if last else Question(whole)


def asked(record: Record, tokenizer: PreTrainedTokenizerBase) -> Question:
    """A held-out prompt with its answer, of which the loss can be measured too."""
    facts, prompt, [answer] = json.loads(record["facts"]), record["prompt"], record["answers"]
    whole = Item((*prompt, *answer), (0.0,) * len(prompt) + (1.0,) * len(answer))
    messages = facts["messages"] and tuple(facts["messages"])
    return replace(_question(tokenizer, whole, prompt, answer), messages=messages, columns=facts["columns"])


def _question(
    tokenizer: PreTrainedTokenizerBase, whole: Item, prompt: Sequence[int], answer: Sequence[int]
) -> Question:
    return Question(
        item=whole,
        prompt_ids=tuple(prompt),
        prompt=str(tokenizer.decode(list(prompt))),
        answer=str(tokenizer.decode(list(answer), skip_special_tokens=True)),
    )


ITEMS: Mapping[ItemKind, Make] = {"sft": item, "pairs": pair, "judged": judged, "prompts": prompt}
QUESTIONS: Mapping[ItemKind, Make] = {"sft": question, "prompts": asked}  # of the others, held-out items are kept
