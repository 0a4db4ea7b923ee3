"""A reward model: a backbone with a head of one number, taught which of two answers is preferred.

    pairs ──collect──▶ trees ──prepare──▶ mini-batches with totals ──▶ scores [N] ──▶ −log sigmoid(chosen − rejected)

Legend: N rows, P pairs. A score is read at the last token of an answer, its end token. The loss (Bradley-Terry,
`losses`) is the mean over the pairs of the whole optimizer step.

Sources: 2203.02155 (InstructGPT), the margin 2307.09288 (Llama 2), centring 2312.09244. Departure: InstructGPT weighs
all pairs of one prompt together, here every pair counts alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.algorithm.parts import LearnsFromData, Parts
from runner.algorithm.preference.config import RmConfig
from runner.algorithm.preference.learning import mini_batches, pack_pairs, pair_metrics, sides
from runner.algorithm.preference.losses import bradley_terry
from runner.core.batch import Batch
from runner.interfaces import Data, Loss, LossFn, Model, Outputs, Pair, Role


@dataclass(frozen=True, slots=True)
class ScoreLoss:
    """The mean over pairs of `bradley_terry`; reads the row channel `margin` [N], where there is one."""

    centring: float
    needs: frozenset[str] = frozenset({"scores"})

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        chosen, rejected = sides(batch, outputs["scores"])
        margin = sides(batch, batch.rows["margin"])[0] if "margin" in batch.rows else 0.0
        found = bradley_terry(chosen, rejected, margin=margin, centring=self.centring)
        return Loss(found.losses.sum() / max(batch.totals["units"], 1), pair_metrics(found))


class RewardModel(LearnsFromData):
    """Learns to score the preferred answer higher."""

    def __init__(self, config: RmConfig, data: Data) -> None:
        self.config, self.data = config, data
        self.losses: Mapping[Role, LossFn] = {"reward_model": ScoreLoss(config.centring)}

    def collect(self, step: int) -> Batch:
        """The step's pairs as trees."""
        return self.experience(self.data.take(step, self.config.batch_size))

    def experience(self, items: Sequence[Pair]) -> Batch:
        """Any pairs as what `prepare` takes."""
        return pack_pairs(items, share=self.config.share_prompts, margins=self.config.use_margin)

    def prepare(self, experience: Batch, models: Mapping[Role, Model]) -> Iterator[Batch]:
        """Mini-batches of whole pairs, each knowing its totals."""
        yield from mini_batches(experience, self.config.mini_batches)


def build(config: RmConfig, parts: Parts) -> RewardModel:
    """The algorithm over the job's data."""
    return RewardModel(config, parts.data)
