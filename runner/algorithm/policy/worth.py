"""What samples are worth, as a config asks for it; `runner.algorithm.policy.valuation` computes it.

A reward is compared with those of its group or its step (`FromRewards`, grpo), or with what a critic expects
(`FromCritic`, ppo); without a reward a token is worth what a teacher makes of it (`FromTeacher`, opd).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Advantage = Literal[
    "group_mean_std",
    "group_mean",
    "leave_one_out",
    "batch_std",
    "opo",
    "none",
    "reinforce_pp",
    "reinforce_pp_baseline",
]


@dataclass(frozen=True, slots=True)
class FromRewards:
    """gamma: discount per token, of reinforce_pp alone."""

    advantage: Advantage
    gamma: float


@dataclass(frozen=True, slots=True)
class FromCritic:
    """Generalised advantages, and the critic that they need.

    role: whose model gives the values; clip: range of the value loss, None = none; coefficient: weight of the value
    error in the policy's loss, None = the critic has a loss of its own
    """

    role: Literal["policy", "critic"]
    gamma: float
    lam: float
    whiten: bool
    clip: float | None
    coefficient: float | None


@dataclass(frozen=True, slots=True)
class FromTeacher:
    """The negative reverse KL, estimated on what was sampled."""


Worth = FromRewards | FromCritic | FromTeacher
