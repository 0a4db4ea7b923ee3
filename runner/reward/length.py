"""Shaping of the length of answers, counted in tokens, the end token included.

overlong (DAPO, 2503.14476, section 3.4):            target:
  0 ────────┐                                          0        ╱╲
             ╲                                                 ╱  ╲
 -1           └───────                                -1 _____╱    ╲_____
      max-cache  max                                        0 target 2·target
"""

from __future__ import annotations

from typing import Any

from runner.interfaces import Completion
from runner.reward.config import LengthConfig
from runner.reward.faults import Faults
from runner.reward.scorer import Scorer, each


def overlong(length: int, most: int, cache: int) -> float:
    """DAPO's soft overlong punishment: 0 up to most - cache tokens, -1 above most, a straight line between."""
    if length > most:
        return -1.0
    return min(0.0, (most - cache - length) / cache)


def nearness(length: int, target: int) -> float:
    """0 at the target, falling in a straight line to -1 at no tokens and at twice the target."""
    return -min(1.0, abs(length - target) / target)


def build(config: LengthConfig, **_: Any) -> Scorer:
    """The reward; `problems` sees to it that there is a target, or else max and cache."""

    def rate(completion: Completion) -> float:
        if config.target is not None:
            return nearness(len(completion.ids), config.target)
        assert config.max is not None and config.cache is not None
        return overlong(len(completion.ids), config.max, config.cache)

    return Scorer(each(rate), Faults("reward=length", 1, ""))
