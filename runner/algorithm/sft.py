"""Supervised fine-tuning and continued pre-training.

    items ──collect──▶ one packed batch ──prepare──▶ mini-batches with totals ──▶ token cross-entropy

Legend: T tokens. The loss is -Σ weight·logprob / (tokens with weight in the whole optimizer step), so it
does not depend on how the step is cut into micro-batches or spread over ranks; with seq_mean_token_mean a row's weights
are divided by their number, and the sum by the rows of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.algorithm.config import AlgorithmConfig, CptConfig, SftConfig
from runner.core.batch import (
    Batch,
    row_layout,
    row_of_tokens,
    row_sum,
    split_rows,
    unread_batch,
    with_totals,
    zero_first,
)
from runner.core.media import MEDIA_ID
from runner.core.metrics import Metrics
from runner.interfaces import Data, Loss, LossFn, Model, Outputs, Role, TokenizedExample, TokenizedExamples
from runner.interfaces.learning import AlgorithmInputs, Experience, OfflineAlgorithm


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Mean negative log-likelihood of weighted tokens, or of rows (see the module); linear in logprobs."""

    needs: frozenset[str] = frozenset({"logprobs"})
    mean_over: Literal["tokens", "rows"] = "tokens"

    def grad_weights(self, batch: Batch) -> Tensor:
        """∂total/∂logprobs, float32 [T]."""
        return -self._weights(batch)[0] / max(batch.totals[self.mean_over], 1)

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        weights, count = self._weights(batch)
        nll = -(weights * outputs["logprobs"]).sum()
        metrics = Metrics()
        metrics.add("train/loss", nll.detach(), count)
        return Loss(nll / max(batch.totals[self.mean_over], 1), metrics)

    def _weights(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each token's weight before the denominator, [T], and how many tokens or rows have one, 0-d."""
        weight = batch.tokens["weight"]
        if self.mean_over == "tokens":
            return weight, (weight != 0).sum()
        lengths = row_sum(batch, (weight != 0).to(weight.dtype))
        return weight / lengths.clamp(min=1)[row_of_tokens(batch)], (lengths > 0).sum()


class PackedAlgorithm(OfflineAlgorithm):
    """Learns given rows: `experience` makes those of a step a packed batch on the CPU."""

    def __init__(self, config: AlgorithmConfig, data: Data, losses: Mapping[Role, LossFn]) -> None:
        self.config, self.data, self.losses = config, data, losses

    def collect(self, step: int) -> Experience:
        """The step's rows as what `prepare` takes."""
        return self.experience(self.data.take(step, self.config.batch_size))

    def experience(self, items: Sequence[Any]) -> Experience:
        """Any rows as what `prepare` takes; these learn the tokens that have a weight."""
        rows = items if isinstance(items, TokenizedExamples) else TokenizedExamples.of(items)

        def read(units: NDArray[np.int64]) -> Mapping[str, Tensor]:
            ids, weights = rows.read(units)
            return {"ids": torch.from_numpy(ids), "weight": zero_first(weights, rows.sizes[units])}

        known = row_layout(rows.sizes, rows.branches)
        media = torch.zeros_like(known["lengths"])
        media[known["start"] == 0] = torch.from_numpy(rows.media)
        return unread_batch({**known, "trained": torch.from_numpy(rows.trained), "media": media}, read)

    def mini_batches(self, experience: Experience) -> list[Batch]:
        """Parts of whole units, without what models add to them."""
        return split_rows(experience, self.config.mini_batches)

    def prepare(self, experience: Experience, models: Mapping[Role, Model]) -> Iterator[Batch]:
        """The mini-batches, each knowing its totals."""
        for part in self.mini_batches(experience):
            yield with_totals(part, part.count())


class ContinuedPretraining(PackedAlgorithm):
    """Learns every token of given text."""

    def experience(self, items: Sequence[TokenizedExample]) -> Batch:
        rows = items if isinstance(items, TokenizedExamples) else TokenizedExamples.of(items)

        def read(units: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
            ids, _ = rows.read(units)
            return ids, (ids < MEDIA_ID).astype(np.float32)

        return super().experience(replace(rows, trained=rows.sizes - 1 - rows.media, branches=None, read=read))


def build(config: SftConfig | CptConfig, parts: AlgorithmInputs) -> PackedAlgorithm:
    """The algorithm over the job's data."""
    loss = CrossEntropy(mean_over="tokens" if config.loss_aggregation == "token_mean" else "rows")
    kind = ContinuedPretraining if isinstance(config, CptConfig) else PackedAlgorithm
    return kind(config, parts.data, {"policy": loss})
