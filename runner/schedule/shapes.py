"""Learning-rate schedules: pure functions of the step.

Each factory takes its config and the number of steps of the run and returns
`factor(step)`, step 0-based, the factor in [0, 1] on the peak learning rate. A fall would end at
step `steps`, one after the last, so that no step is made with a learning rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from runner.schedule.config import ConstantConfig, CosineConfig, DecayConfig, LinearConfig, ScheduleConfig, WsdConfig

Factor = Callable[[int], float]


def _after_warmup(config: ScheduleConfig, steps: int, shape: Callable[[float], float]) -> Factor:
    """Linear rise over the warm-up, then `shape` of the fraction that is done of the steps that follow."""
    warmup = config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return shape((step - warmup) / (steps - warmup))

    return factor


def _fall(config: DecayConfig, height: float) -> float:
    return config.final_ratio + (1.0 - config.final_ratio) * height


def constant(config: ConstantConfig, *, steps: int) -> Factor:
    """The peak, to the end."""
    return _after_warmup(config, steps, lambda done: 1.0)


def linear(config: LinearConfig, *, steps: int) -> Factor:
    """A straight line from 1 to final_ratio."""
    return _after_warmup(config, steps, lambda done: _fall(config, 1.0 - done))


def cosine(config: CosineConfig, *, steps: int) -> Factor:
    """Half a cosine from 1 to final_ratio (Loshchilov & Hutter, 1608.03983, eq. 5, without restarts)."""
    return _after_warmup(config, steps, lambda done: _fall(config, 0.5 * (1.0 + math.cos(math.pi * done))))


def wsd(config: WsdConfig, *, steps: int) -> Factor:
    """1 until the last decay_steps, then a straight line to final_ratio (Hu et al., 2404.06395, §4).

    Departure from the paper: its final fall is exponential; a straight line is what its successors use.
    """
    decay = config.decay_steps or max(steps // 10, 1)
    span = max(steps - config.warmup_steps, 1)
    return _after_warmup(config, steps, lambda done: _fall(config, min(1.0, (1.0 - done) * span / decay)))
