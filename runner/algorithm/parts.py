"""What an algorithm is made of, beside its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from runner.batch import Batch
from runner.protocols import Data, Decide, Environments, Model, Outputs, Reward, Role, Sampler


class HeadedModel(Model, Protocol):
    """A frozen model, and its head by itself."""

    def alone(self, batch: Batch, needs: frozenset[str]) -> Outputs: ...  # of a micro-batch, which is one rank's own

    def lm_head(self) -> Callable[[Tensor], Tensor]: ...  # output `hidden` [S, H] → logits [S, V]; or UnfitModel


@dataclass(frozen=True, slots=True)
class Parts:
    """What `build` hands to every algorithm; sampler, reward and environments are None where the job has none.

    frozen: the models that only score, by role
    """

    data: Data
    tokenizer: Any
    seed: int
    decide: Decide
    sampler: Sampler | None = None
    reward: Reward | None = None
    environments: Environments | None = None
    frozen: Mapping[Role, HeadedModel] = field(default_factory=dict)
