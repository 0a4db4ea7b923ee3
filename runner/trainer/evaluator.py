"""Held-out evaluation: the loss on held-out tokens and the exact match of greedy answers; on pairs and judged answers,
of which nothing can be asked, the algorithm's own loss.

    question ──generate──▶ answer ──the same as the expected one?──▶ eval/exact_match
    question ──generate──▶ turn ──environment──▶ words ──generate──▶ … ──▶ answer     the same, with an environment
    held-out items ──experience──▶ prepare ──▶ measure, no gradient ──▶ the loss's metrics, under eval/

It runs between steps, draws no random number and leaves no trace in training. It knows no algorithm: whatever the loss
measures as `train/x`, `reward/x` or `policy/x` becomes `eval/x`. What a frozen model says of held-out items is the same
in each evaluation, and is computed in the first.

Legend: N rows, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from runner.core.batch import Batch, pack, unit_spans
from runner.core.errors import OutOfMemory
from runner.core.metrics import Metrics
from runner.interfaces import (
    LOGPROBS,
    Decide,
    EvalQuestion,
    Experience,
    LossFn,
    Model,
    Outputs,
    Prompt,
    Role,
)
from runner.trainer.evaluation_metrics import with_interval
from runner.trainer.reference_model import unit_keys

Sample = dict[str, Any]


class Answered(Protocol):
    """A final answer, and what was said before it by the policy and an environment."""

    @property
    def text(self) -> str: ...

    @property
    def history(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers under eval/, and the answers that were given."""

    values: Mapping[str, float]
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Measures the loss on `questions` in batches of `batch_size`, and compares the greedy answers to those `asked`.

    max_new_tokens: of an answer, for messages; collect: an answer to each prompt, the last turn where there are several
    """

    questions: Sequence[EvalQuestion]
    asked: Sequence[EvalQuestion]
    batch_size: int
    max_new_tokens: int
    collect: Callable[[Sequence[Prompt]], Sequence[Answered]]

    def evaluate(self, model: Model) -> Report:
        """eval/loss (nats per learnt token) and eval/exact_match (share of greedy answers equal to the expected).

        Raises OutOfMemory, naming the knob, where the device cannot answer so many questions at once.
        """
        start = time.perf_counter()
        metrics = self._loss(model)
        samples = list(self._ask())
        exact = with_interval("eval/exact_match", [float(s["exact"]) for s in samples], share=True)
        metrics.add("time/eval_s", time.perf_counter() - start)
        return Report({**metrics.result(), **exact}, samples)

    def _loss(self, model: Model) -> Metrics:
        metrics = Metrics()
        for questions in _batches(self.questions, self.batch_size):
            items = [question.item for question in questions]
            batch = pack([i.ids for i in items], [i.weights for i in items], [i.branches for i in items])
            logprobs = model.forward(batch, frozenset({"logprobs"}))["logprobs"].cpu()
            weight = batch.tokens["weight"]
            metrics.add("eval/loss", -(weight * logprobs).sum(), (weight != 0).sum())
        return metrics

    def _ask(self) -> Iterator[Sample]:
        try:
            answers = self.collect([Prompt(q.prompt_ids, q.prompt, q.messages, q.columns) for q in self.asked])
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the device's memory is exhausted by {min(self.batch_size, len(self.asked))} answers at once: "
                f"{str(error).splitlines()[0]}\n"
                f"  lower evaluation.batch_size (now {self.batch_size}) or evaluation.max_new_tokens "
                f"(now {self.max_new_tokens})"
            ) from error
        for question, answer in zip(self.asked, answers, strict=True):
            yield {
                "prompt": question.prompt,
                **({"turns": list(answer.history)} if answer.history else {}),
                "answer": answer.text,
                "expected": question.answer,
                "exact": answer.text.strip() == question.answer.strip(),
            }


def askable(
    questions: Sequence[EvalQuestion],
    tokenizer: Any,
    max_new_tokens: int,
    decide: Decide,
    metric: str = "eval/exact_match",
    section: str = "evaluation",
) -> list[EvalQuestion]:
    """The questions that can be answered rightly within `max_new_tokens`; how many cannot is decided, and said."""
    with_answer = [q for q in questions if q.prompt_ids and q.answer]
    found = [q for q in with_answer if _fits(q, tokenizer, max_new_tokens)]
    if left_out := len(with_answer) - len(found):
        reason = f"their expected answers are longer than {section}.max_new_tokens={max_new_tokens}"
        decide(metric, f"{len(with_answer)} questions", f"{len(found)}; {left_out} are left out", reason)
    return found


def _fits(question: EvalQuestion, tokenizer: Any, max_new_tokens: int) -> bool:
    """Whether the first tokens of the expected answer hold all of its text."""
    ids = question.answer_ids or question.item.ids[len(question.prompt_ids) :]
    best = tokenizer.decode(list(ids[:max_new_tokens]), skip_special_tokens=True)
    return bool(best.strip().startswith(question.answer.strip()))


def _batches(questions: Sequence[EvalQuestion], size: int) -> Iterator[list[EvalQuestion]]:
    iterator = iter(questions)
    while batch := list(islice(iterator, size)):
        yield batch


@runtime_checkable
class LearnsFromItems(Protocol):
    """What is needed of an algorithm: one unit per item, in the order of the items."""

    losses: Mapping[Role, LossFn]

    def experience(self, items: Sequence[Any]) -> Experience: ...

    def prepare(self, experience: Experience, models: Mapping[Role, Model]) -> Iterator[Batch]: ...


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Measures `algorithm` on `items` (records with tuples of ids, such as `Pair`).

    batch_size: most items at once; that of training, where a loss couples its mini-batch (kto)
    samples: how many items are reported in words
    """

    algorithm: LearnsFromItems
    items: Sequence[Any]
    batch_size: int
    samples: int
    tokenizer: Any

    def evaluate(self, models: Mapping[Role, Model]) -> Report:
        """eval/loss, eval/accuracy, eval/margin, … (whatever the loss measures), and time/eval_s.

        A sample is an item in words, with its own numbers under the same names.
        """
        start = time.perf_counter()
        metrics, samples = Metrics(), list[Sample]()
        for items, batch in self._batches(models):
            for role, loss in self.algorithm.losses.items():
                learner: Any = models[role]  # what a loss is of
                outputs = {name: value.cpu() for name, value in learner.measure(batch, loss).items()}
                metrics.merge(loss(batch, outputs).metrics)
                scored = zip(items, _per_unit(batch, outputs, loss), strict=True)
                samples += [self._sample(*one) for one in islice(scored, self.samples - len(samples))]
        return Report({**_renamed(metrics.result()), "time/eval_s": time.perf_counter() - start}, samples)

    def _batches(self, models: Mapping[Role, Model]) -> Iterator[tuple[Sequence[Any], Batch]]:
        """Prepared mini-batches, each with its items."""
        for items in shares(self.items, self.batch_size):
            first = 0
            for batch in self.algorithm.prepare(self.algorithm.experience(items), models):
                last = first + len(unit_spans(batch))
                yield items[first:last], batch
                first = last

    def _sample(self, item: Any, metrics: Metrics) -> Sample:
        words = {f.name: self._worded(getattr(item, f.name)) for f in fields(item)}
        return {**words, **{n: v for n, v in _renamed(metrics.result()).items() if not math.isnan(v)}}

    def _worded(self, value: Any) -> Any:
        return self.tokenizer.decode(value) if isinstance(value, tuple) else value


class Remembered:
    """A frozen model that is asked once for each batch's log-probabilities, which stay in memory (4 bytes a token)."""

    def __init__(self, model: Model) -> None:
        self._model, self._known = model, dict[tuple[bytes, ...], Tensor]()

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """See `Model`; logprobs on the CPU, anything else from the model itself."""
        if needs != LOGPROBS:
            return self._model.forward(batch, needs)
        key = tuple(unit_keys(batch))
        if key not in self._known:
            self._known[key] = self._model.forward(batch, needs)["logprobs"].cpu()
        return {"logprobs": self._known[key]}


def shares(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Runs of at most `most` items whose sizes differ by at most one, so that none is left with very few."""
    count = math.ceil(len(items) / most)
    edges = [len(items) * i // count for i in range(count + 1)]
    return (items[a:b] for a, b in pairwise(edges))


def _per_unit(batch: Batch, outputs: Outputs, loss: LossFn) -> Iterator[Metrics]:
    """What the loss measures on each unit by itself."""
    token = 0
    for first, last, size in unit_spans(batch):
        tokens, rows = slice(token, token + size), slice(first, last)
        mine = {n: v[tokens if len(v) == batch.num_tokens else rows] for n, v in outputs.items()}
        yield loss(batch.slice_rows(first, last), mine).metrics
        token += size


def _renamed(values: Mapping[str, float]) -> dict[str, float]:
    return {f"eval/{name.rpartition('/')[2]}": value for name, value in values.items()}
