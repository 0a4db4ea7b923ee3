"""What an algorithm is made of, beside its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runner.protocols import Data, Decide, Environments, Reward, Role, Sampler


def _no_head(role: Role) -> Callable[[Tensor], Tensor]:
    raise LookupError(f"no frozen model is a {role}")


@dataclass(frozen=True, slots=True)
class Parts:
    """What `build` hands to every algorithm; sampler, reward and environments are None where the job has none.

    lm_head: of a frozen model, by role: output `hidden` [S, H] → logits [S, V], without gradient; raises SpecError for
    a model that has no such head
    """

    data: Data
    tokenizer: Any
    seed: int
    decide: Decide
    sampler: Sampler | None = None
    reward: Reward | None = None
    environments: Environments | None = None
    lm_head: Callable[[Role], Callable[[Tensor], Tensor]] = _no_head
