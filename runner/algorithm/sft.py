"""Supervised fine-tuning and continued pre-training.

    items ──collect──▶ one packed batch ──prepare──▶ mini-batches with totals ──▶ token cross-entropy

Legend: T tokens. The loss is -Σ weight·logprob / (tokens with weight in the whole optimizer step), so it
does not depend on how the step is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from runner.algorithm.config import CptConfig, SftConfig
from runner.core.batch import Batch, pack, split_rows, with_totals
from runner.core.metrics import Metrics
from runner.interfaces import Data, Loss, LossFn, Model, Outputs, Role
from runner.interfaces.learning import AlgorithmInputs, OfflineAlgorithm


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Mean negative log-likelihood of the weighted tokens; linear in the logprobs."""

    needs: frozenset[str] = frozenset({"logprobs"})

    def grad_weights(self, batch: Batch) -> Tensor:
        """∂total/∂logprobs, float32 [T]."""
        return -batch.tokens["weight"] / max(batch.totals["tokens"], 1)

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        nll = -(batch.tokens["weight"] * outputs["logprobs"]).sum()
        metrics = Metrics()
        metrics.add("train/loss", nll.detach(), (batch.tokens["weight"] != 0).sum())
        return Loss(nll / max(batch.totals["tokens"], 1), metrics)


class Sft(OfflineAlgorithm):
    """Learns given answers (sft) or every token of given text (cpt)."""

    def __init__(self, config: SftConfig | CptConfig, data: Data) -> None:
        self.config = config
        self.data = data
        self.losses: Mapping[Role, LossFn] = {"policy": CrossEntropy()}

    def collect(self, step: int) -> Batch:
        """The step's items as one packed batch on the CPU."""
        items = self.data.take(step, self.config.batch_size)
        if isinstance(self.config, CptConfig):
            return pack([i.ids for i in items], [[1.0] * len(i.ids) for i in items])
        return pack([i.ids for i in items], [i.weights for i in items], [i.branches for i in items])

    def prepare(self, experience: Batch, models: Mapping[Role, Model]) -> Iterator[Batch]:
        """The batch in `mini_batches` parts, each knowing its totals."""
        for part in split_rows(experience, self.config.mini_batches):
            yield with_totals(part, part.count())


def build(config: SftConfig | CptConfig, parts: AlgorithmInputs) -> Sft:
    """The algorithm over the job's data."""
    return Sft(config, parts.data)
