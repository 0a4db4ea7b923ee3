"""Held-out evaluation: the loss on held-out tokens and the exact match of greedy answers.

    question ──generate──▶ answer ──the same as the expected one?──▶ eval/exact_match
    question ──generate──▶ turn ──environment──▶ words ──generate──▶ … ──▶ answer     the same, with an environment

It runs between steps, draws no random number and leaves no trace in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from runner.core.batch import pack
from runner.core.errors import OutOfMemory
from runner.core.metrics import Metrics
from runner.interfaces import Decide, Finish, GreedyAnswerer, Model, Prompt, Question, Written

Sample = dict[str, Any]


class Answered(Protocol):
    """A final answer, and what was said before it by the policy and an environment."""

    @property
    def text(self) -> str: ...

    @property
    def before(self) -> Sequence[Mapping[str, Any]]: ...


# Plays a conversation for each prompt, whose turns are what the function given makes of the ids so far.
Converse = Callable[[Sequence[Prompt], Callable[[Sequence[Sequence[int]]], list[Written]]], Sequence[Answered]]


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers under eval/, and the answers that were given."""

    values: Mapping[str, float]
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Measures the loss on `questions` in batches of `batch_size`, and asks those `asked`, with as many answers in work
    at once, for at most `max_new_tokens` tokens. `finish` ends an answer earlier; None = the model alone does. With
    `converse` an answer is the last turn of a conversation, and both are a turn's."""

    questions: Sequence[Question]
    asked: Sequence[Question]
    batch_size: int
    max_new_tokens: int
    converse: Converse | None = None
    finish: Finish | None = None

    def evaluate(self, model: Model, answerer: GreedyAnswerer) -> Report:
        """eval/loss (nats per learnt token) and eval/exact_match (share of greedy answers equal to the expected).

        Raises OutOfMemory, naming the knob, where the device cannot answer so many questions at once.
        """
        start = time.perf_counter()
        metrics = self._loss(model)
        samples = list(self._ask(answerer))
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

    def _ask(self, answerer: GreedyAnswerer) -> Iterator[Sample]:
        try:
            answers = self._answers(answerer)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the device's memory is exhausted by {min(self.batch_size, len(self.asked))} answers at once: "
                f"{str(error).splitlines()[0]}\n"
                f"  lower evaluation.batch_size (now {self.batch_size}) or evaluation.max_new_tokens "
                f"(now {self.max_new_tokens})"
            ) from error
        for question, (text, before) in zip(self.asked, answers, strict=True):
            yield {
                "prompt": question.prompt,
                **({"turns": list(before)} if before else {}),
                "answer": text,
                "expected": question.answer,
                "exact": text.strip() == question.answer.strip(),
            }

    def _answers(self, answerer: GreedyAnswerer) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
        """The final answer to each question, and what was said before it."""
        generate = partial(answerer.generate, max_new_tokens=self.max_new_tokens, rows=self.batch_size)
        if self.finish is not None:
            generate = partial(generate, finish=self.finish)
        if self.converse is not None:
            prompts = [Prompt(q.prompt_ids, q.prompt, q.messages, q.columns) for q in self.asked]
            return [(one.text, one.before) for one in self.converse(prompts, generate)]
        found = generate([q.prompt_ids for q in self.asked])
        return [(answerer.tokenizer.decode(one.ids, skip_special_tokens=True), ()) for one in found]


def askable(questions: Sequence[Question], tokenizer: Any, max_new_tokens: int, decide: Decide) -> list[Question]:
    """The questions that can be answered rightly within `max_new_tokens`; how many cannot is decided, and said."""
    with_answer = [q for q in questions if q.prompt_ids]
    found = [q for q in with_answer if _fits(q, tokenizer, max_new_tokens)]
    if left_out := len(with_answer) - len(found):
        reason = f"their expected answers are longer than evaluation.max_new_tokens={max_new_tokens}"
        decide("eval/exact_match", f"{len(with_answer)} questions", f"{len(found)}; {left_out} are left out", reason)
    return found


def _fits(question: Question, tokenizer: Any, max_new_tokens: int) -> bool:
    """Whether the first tokens after the prompt, which are the expected answer's, hold all of its text."""
    first = len(question.prompt_ids)
    best = tokenizer.decode(list(question.item.ids[first : first + max_new_tokens]), skip_special_tokens=True)
    return bool(best.strip().startswith(question.answer.strip()))


def _batches(questions: Sequence[Question], size: int) -> Iterator[list[Question]]:
    iterator = iter(questions)
    while batch := list(islice(iterator, size)):
        yield batch
