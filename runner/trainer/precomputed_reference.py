"""A frozen model that is asked beforehand: what a run will want to know is computed once and kept, then looked up.

    before the first step   batches the run will ask for ──unknown ones──▶ the model ──▶ kept log-probabilities
    in the run              batch ──▶ kept log-probabilities                     no second model, no second pass

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from runner.core.batch import Batch, unit_spans
from runner.core.errors import RunnerError
from runner.distributed.work_partition import ALONE
from runner.interfaces import LOGPROBS, Outputs, Peers, TrainableModel
from runner.trainer.logprob_cache import KeptLogprobs, unit_keys
from runner.trainer.reference_model import FrozenModel


class CachedModel(FrozenModel):
    """Knows the logprobs of the units that it was asked to `learn`, and of those that were kept before.

    The model may be the one that a run trains: it is asked only before the first step.
    """

    def __init__(
        self,
        model: TrainableModel,
        kept: KeptLogprobs,
        origin: Mapping[str, str],
        everyone: Peers = ALONE,
        **options: Any,
    ) -> None:
        """origin: where the model's weights come from; everyone: all ranks, each of which has what is kept; options:
        see `FrozenModel`."""
        super().__init__(model, **options)
        self.kept, self._origin, self._everyone = kept, origin, everyone

    @property
    def origin(self) -> Mapping[str, str]:
        """Where the weights come from that the log-probabilities are of."""
        return self._origin

    def learn(self, batch: Batch) -> int:
        """Score a batch if any of its units is unknown; returns how many were.

        The whole batch is scored, so that a number does not depend on what else was known.
        """
        keys = unit_keys(batch)
        own = {key for key in keys if key not in self.kept}
        unknown = set().union(*self._everyone.gather(own))  # ranks whose caches differ still score the same batches
        if unknown:
            logprobs = super().forward(batch, LOGPROBS)["logprobs"].cpu()
            sizes = [size for *_, size in unit_spans(batch)]
            for key, values in zip(keys, torch.split(logprobs, sizes), strict=True):
                if key not in self.kept:
                    self.kept.add(key, values)
        return len(unknown)

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """logprobs, float32 [T] on the CPU. Raises RunnerError for another output, and for a unit that is not known."""
        if needs != LOGPROBS:
            raise RunnerError(f"logprobs were computed beforehand, and nothing else: {', '.join(sorted(needs))}")
        try:
            return {"logprobs": torch.cat([self.kept[key] for key in unit_keys(batch)])}
        except KeyError as error:
            raise RunnerError(
                "a reference log-probability is asked for that was not computed beforehand; "
                "type algorithm.reference=copy, and report this with the job's spec.yaml"
            ) from error
