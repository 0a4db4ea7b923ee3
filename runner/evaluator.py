"""Held-out evaluation: the loss on held-out tokens and the exact match of greedy answers.

It runs between steps, draws no random number and leaves no trace in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from runner.batch import pack
from runner.metrics import Metrics
from runner.protocols import Model, Question

Sample = dict[str, Any]


class Answerer(Protocol):
    """What can be asked."""

    tokenizer: Any

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers under eval/, and the answers that were given."""

    values: Mapping[str, float]
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Asks `questions` in batches of `batch_size`, with answers of at most `max_new_tokens` tokens."""

    questions: Sequence[Question]
    batch_size: int
    max_new_tokens: int

    def evaluate(self, model: Model, answerer: Answerer) -> Report:
        """eval/loss (nats per learnt token) and eval/exact_match (share of greedy answers equal to the expected)."""
        start = time.perf_counter()
        metrics = self._loss(model)
        samples = [s for batch in _batches(self._askable(), self.batch_size) for s in self._ask(answerer, batch)]
        if samples:
            metrics.add("eval/exact_match", sum(s["exact"] for s in samples), len(samples))
        metrics.add("time/eval_s", time.perf_counter() - start)
        return Report(metrics.result(), samples)

    def _loss(self, model: Model) -> Metrics:
        metrics = Metrics()
        for questions in _batches(self.questions, self.batch_size):
            batch = pack([q.item.ids for q in questions], [q.item.weights for q in questions])
            logprobs = model.forward(batch, frozenset({"logprobs"}))["logprobs"].cpu()
            weight = batch.tokens["weight"]
            metrics.add("eval/loss", -(weight * logprobs).sum(), (weight != 0).sum())
        return metrics

    def _askable(self) -> list[Question]:
        return [q for q in self.questions if q.prompt_ids]

    def _ask(self, answerer: Answerer, questions: Sequence[Question]) -> Iterator[Sample]:
        answers = answerer.generate([q.prompt_ids for q in questions], self.max_new_tokens)
        for question, ids in zip(questions, answers, strict=True):
            text = answerer.tokenizer.decode(ids, skip_special_tokens=True)
            yield {
                "prompt": question.prompt,
                "answer": text,
                "expected": question.answer,
                "exact": text.strip() == question.answer.strip(),
            }


def _batches(questions: Sequence[Question], size: int) -> Iterator[list[Question]]:
    iterator = iter(questions)
    while batch := list(islice(iterator, size)):
        yield batch
