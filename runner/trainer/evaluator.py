"""Held-out loss: of the tokens of expected answers, or the algorithm's own loss on held-out items.

    questions ──score──▶ log-probabilities of the expected answers ──▶ eval/loss
    held-out items ──experience──▶ prepare ──▶ measure, no gradient ──▶ the loss's metrics, under eval/

It runs between steps, draws no random number and leaves no trace in training. It knows no algorithm: whatever the loss
measures as `train/x`, `reward/x` or `policy/x` becomes `eval/x`. The log-probabilities of a frozen model are the same
in each evaluation, and are computed in the first.

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
from runner.core.media import without_media
from runner.core.metrics import Metrics
from runner.interfaces import LOGPROBS, Experience, LossFn, Model, Outputs, Role, TokenizedExample
from runner.trainer.evaluation_metrics import ratio_with_interval
from runner.trainer.reference_model import unit_keys

Sample = dict[str, Any]
ScoreItems = Callable[[Sequence[TokenizedExample]], list[list[float]]]  # → log-probabilities (nats), but of the first


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers under eval/, and the answers that were given."""

    values: Mapping[str, float]
    samples: Sequence[Sample]


def score_items(model: Model, items: Sequence[TokenizedExample]) -> list[list[float]]:
    """The log-probability (nats) of each token of each item but the first one."""
    batch = pack([i.ids for i in items], [i.weights for i in items], [i.branches for i in items])
    found = torch.split(model.forward(batch, LOGPROBS)["logprobs"].cpu(), [len(i.ids) for i in items])
    return [item[1:].tolist() for item in found]


def weighted_logprobs(items: Sequence[TokenizedExample], score: ScoreItems, batch_size: int) -> list[float]:
    """Σ weight · log-probability (nats) over the tokens of each item; batch_size: most items at once."""
    scored = [logprobs for part in even_batches(items, batch_size) for logprobs in score(part)]
    return [math.fsum(map(math.prod, zip(i.weights[1:], s, strict=True))) for i, s in zip(items, scored, strict=True)]


def question_loss(items: Sequence[TokenizedExample], score: ScoreItems, batch_size: int) -> dict[str, float]:
    """loss, in nats per token with a weight, and its interval; nothing where no token has one."""
    items = [item for item in items if any(item.weights[1:])]
    losses = [-logprob for logprob in weighted_logprobs(items, score, batch_size)]
    return ratio_with_interval("loss", losses, [sum(weight != 0 for weight in item.weights[1:]) for item in items])


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
        return Report({**_under_eval(metrics.result()), "time/eval_s": time.perf_counter() - start}, samples)

    def _batches(self, models: Mapping[Role, Model]) -> Iterator[tuple[Sequence[Any], Batch]]:
        """Prepared mini-batches, each with its items."""
        for items in even_batches(self.items, self.batch_size):
            first = 0
            for batch in self.algorithm.prepare(self.algorithm.experience(items), models):
                last = first + len(unit_spans(batch))
                yield items[first:last], batch
                first = last

    def _sample(self, item: Any, metrics: Metrics) -> Sample:
        words = {f.name: self._item_text(getattr(item, f.name)) for f in fields(item)}
        return {**words, **{n: v for n, v in _under_eval(metrics.result()).items() if not math.isnan(v)}}

    def _item_text(self, value: Any) -> Any:
        return self.tokenizer.decode(without_media(value)) if isinstance(value, tuple) else value


class MemoizedModel:
    """A frozen model that keeps the log-probabilities of each batch in memory, 4 bytes a token."""

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


def even_batches(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Batches of at most `most` items; their sizes differ by at most one, so that none is very small."""
    count = math.ceil(len(items) / most)
    edges = [len(items) * i // max(count, 1) for i in range(count + 1)]
    return (items[a:b] for a, b in pairwise(edges))


def _per_unit(batch: Batch, outputs: Outputs, loss: LossFn) -> Iterator[Metrics]:
    """What the loss measures on each unit by itself."""
    token = 0
    for first, last, size in unit_spans(batch).tolist():
        tokens, rows = slice(token, token + size), slice(first, last)
        mine = {n: v[tokens if len(v) == batch.num_tokens else rows] for n, v in outputs.items()}
        yield loss(batch.slice_rows(first, last), mine).metrics
        token += size


def _under_eval(values: Mapping[str, float]) -> dict[str, float]:
    return {f"eval/{name.rpartition('/')[2]}": value for name, value in values.items()}
