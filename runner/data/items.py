"""Tokens to what the trainer sees: items to learn, and held-out questions to ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.protocols import Item, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def item(ids: Sequence[int], learnt: Sequence[int]) -> Item:
    """The item of a tokenised row: weight 1 where it is learnt, 0 where it is context."""
    return Item(tuple(ids), tuple(map(float, learnt)))


def question(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], learnt: Sequence[int], answer: tuple[int, int]
) -> Question:
    """What to ask and what to expect: all before the last assistant turn, and what a perfect answer decodes to.

    `answer` is the turn's half-open span, (0, 0) for plain text and for a turn that was cut: then only the item
    is there, of which the loss can be measured.
    """
    first, last = answer
    if not last:
        return Question(item(ids, learnt))
    return Question(
        item=item(ids, learnt),
        prompt_ids=tuple(ids[:first]),
        prompt=str(tokenizer.decode(list(ids[:first]))),
        answer=str(tokenizer.decode(list(ids[first:last]), skip_special_tokens=True)),
    )
