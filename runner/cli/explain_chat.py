r"""`run explain chat JOB`: the first row of the data token by token, and which tokens are trained on.

context  <|im_start|> · u · s · e · r · \n · …          what is given
trained  0 · 1 · 3 · 5 · <|im_end|>                     what the loss counts; green on a terminal
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from runner.core.auto_choices import Decisions
from runner.interfaces import LabeledCompletion, PreferencePair, Prompt, TokenizedExample
from runner.spec.job import JobSpec
from runner.tracker.text import escape_for_terminal

WIDTH = 110
GREEN, PLAIN = "\033[32m", "\033[0m"
Part = tuple[str, Sequence[int], Sequence[float]]  # label, ids, weights: above 0 where a token is trained on


def explain_chat(spec: JobSpec) -> Iterator[str]:
    """The lines that show the first row. Raises what reading the data raises."""
    from runner.build.components import build_data, build_tokenizer

    decide = Decisions(spec.strict)
    tokenizer = build_tokenizer(spec)
    data = build_data(spec, tokenizer, decide)
    parts = row_parts(data.take(0, 1)[0])
    tokens, trained = sum(len(ids) for _, ids, _ in parts), sum(w > 0 for *_, weights in parts for w in weights)
    where = f"data={spec.data.name} for algorithm={spec.algorithm.name}"
    yield f"first row of {where}: {tokens} tokens, {trained} trained on"
    yield from (str(entry) for entry in decide.entries)
    colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for label, ids, weights in parts:
        yield ""
        if label:
            yield f"{label}:"
        yield from _token_lines(tokenizer, ids, weights, colored)


def row_parts(item: Any) -> list[Part]:
    """The stretches of an item that are shown under a heading of their own."""
    if isinstance(item, TokenizedExample):
        edges = [0, *item.branches, len(item.ids)]
        labels = [""] if not item.branches else ["shared beginning", *(f"turn {n + 1}" for n in range(len(edges) - 2))]
        spans = zip(labels, pairwise(edges), strict=True)
        return [(label, item.ids[a:b], item.weights[a:b]) for label, (a, b) in spans]
    if isinstance(item, PreferencePair):
        answers = [("chosen", item.chosen), ("rejected", item.rejected)]
    elif isinstance(item, LabeledCompletion):
        answers = [("good" if item.good else "bad", item.completion)]
    else:
        assert isinstance(item, Prompt)
        return [("prompt, which the policy answers", item.ids, [0.0] * len(item.ids))]
    parts = [("prompt", item.prompt, 0.0), *((label, ids, 1.0) for label, ids in answers)]
    return [(label, ids, [weight] * len(ids)) for label, ids, weight in parts]


def _token_lines(tokenizer: Any, ids: Sequence[int], weights: Sequence[float], colored: bool) -> Iterator[str]:
    """Tokens with a dot between them; each stretch of context or of trained tokens begins a line."""
    for trained, stretch in groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1] > 0):
        texts = [escape_for_terminal(tokenizer.decode([token])) or f"<{token}>" for token, _ in stretch]
        shown = " · ".join(text.replace(" ", "␣") for text in texts)
        on, off = (GREEN, PLAIN) if colored and trained else ("", "")
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        for at, line in enumerate(textwrap.wrap(shown, WIDTH - 9, **options)):
            label = ("trained" if trained else "context") if at == 0 else ""
            yield f"{label:<9}{on}{line}{off}"
