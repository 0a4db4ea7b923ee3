"""What an algorithm is made of, beside its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner.protocols import Data, Decide, Environments, Reward, Sampler


@dataclass(frozen=True, slots=True)
class Parts:
    """What `build` hands to every algorithm; sampler, reward and environments are None where the job has none."""

    data: Data
    tokenizer: Any
    seed: int
    decide: Decide
    sampler: Sampler | None = None
    reward: Reward | None = None
    environments: Environments | None = None
