"""A model that only scores: a reference, a teacher, a policy with its adapter off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from runner.core.batch import Batch
from runner.core.errors import UnfitModel
from runner.distributed.work_partition import ALONE, UNDIVIDED
from runner.interfaces import Outputs, Peers, Stage, TrainableModel, generative
from runner.trainer.learner import score


class FrozenModel:
    """Scores batches of any size without gradient; `during` holds while it does, e.g. with the adapter disabled."""

    def __init__(
        self,
        model: TrainableModel,
        *,
        budget: int,
        device: torch.device,
        during: Callable[[], AbstractContextManager[Any]] = nullcontext,
        peers: Peers = ALONE,
        stage: Stage = UNDIVIDED,
    ) -> None:
        """stage: which of the model's layers are here."""
        self._model, self._budget, self._device, self._during = model, budget, device, during
        self._peers, self._stage = peers, stage

    @property
    def origin(self) -> Mapping[str, str]:
        """Where its weights come from."""
        return self._model.origin

    def lm_head(self) -> Callable[[Tensor], Tensor]:
        """What makes logits [S, V] of its output `hidden` [S, H]. Raises UnfitModel without such a head."""
        model = generative(self._model)
        if model is None:
            raise UnfitModel(f"{type(self._model).__name__} has no LM head")
        return model.lm_head()

    @torch.no_grad()
    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """The outputs named in `needs`, [T] or [N], on the model's device; all ranks ask for the same."""
        return self._scored(batch, needs, self._peers)

    @torch.no_grad()
    def alone(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """The same of a batch that is this rank's own."""
        return self._scored(batch, needs, ALONE)

    def _scored(self, batch: Batch, needs: frozenset[str], peers: Peers) -> Outputs:
        with self._during():
            options: dict[str, Any] = {"peers": peers, "stage": self._stage}
            return score(self._model, batch, needs, budget=self._budget, device=self._device, **options)
