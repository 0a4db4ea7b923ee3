"""Learning-rate schedules: pure functions of the step.

Each factory takes its config and the number of steps of the run and returns
`factor(step)`, step 0-based, the factor in [0, 1] on the peak learning rate. A fall would end at
step `steps`, one after the last, so that no step is made with a learning rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig


class ScheduleConfig(ComponentConfig):
    """A factor on the learning rate, from the fraction of the run that is done."""

    group: ClassVar[str] = "schedule"
    falls: ClassVar[bool] = False  # towards the end of the run
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warmup from 0 to the peak learning rate.")


class ConstantConfig(ScheduleConfig):
    """Constant learning rate."""

    factory: ClassVar[str] = "runner.schedule.config:constant"
    name: Literal["constant"] = "constant"


class DecayConfig(ScheduleConfig):
    """Options of decaying schedules. The minimum would be reached one step after the last."""

    falls: ClassVar[bool] = True

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Final learning rate as a fraction of the peak.")


class LinearConfig(DecayConfig):
    """Linear decay from the peak to the end."""

    factory: ClassVar[str] = "runner.schedule.config:linear"
    name: Literal["linear"] = "linear"


class CosineConfig(DecayConfig):
    """Cosine decay from the peak to the end (Loshchilov & Hutter, 1608.03983)."""

    factory: ClassVar[str] = "runner.schedule.config:cosine"
    name: Literal["cosine"] = "cosine"


class WsdConfig(DecayConfig):
    """Warm-up, stable, decay (Hu et al., 2404.06395): constant at the peak, then linear decay."""

    factory: ClassVar[str] = "runner.schedule.config:wsd"
    name: Literal["wsd"] = "wsd"
    decay_steps: int = Field(default=0, ge=0, description="Steps of the final decay; 0 = a tenth of the run.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if not self.decay_steps or job.epochs is not None or self.warmup_steps + self.decay_steps <= job.steps:
            return []
        warmup = f"schedule.warmup_steps={self.warmup_steps}"
        return [("schedule.decay_steps", f"the sum of {self.decay_steps} and {warmup} is above steps={job.steps}")]


COMPONENTS = (ConstantConfig, LinearConfig, CosineConfig, WsdConfig)


Factor = Callable[[int], float]


def _after_warmup(config: ScheduleConfig, steps: int, shape: Callable[[float], float]) -> Factor:
    """Linear rise over the warm-up, then `shape` of the fraction that is done of the steps that follow."""
    warmup = config.warmup_steps

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else shape((step - warmup) / (steps - warmup))

    return factor


def _decayed_factor(config: DecayConfig, height: float) -> float:
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height


def constant(config: ConstantConfig, *, steps: int) -> Factor:
    """Constant learning rate."""
    return _after_warmup(config, steps, lambda done: 1.0)


def linear(config: LinearConfig, *, steps: int) -> Factor:
    """A straight line from 1 to min_lr_ratio."""
    return _after_warmup(config, steps, lambda done: _decayed_factor(config, 1.0 - done))


def cosine(config: CosineConfig, *, steps: int) -> Factor:
    """Half a cosine from 1 to min_lr_ratio (Loshchilov & Hutter, 1608.03983, eq. 5, without restarts)."""
    return _after_warmup(config, steps, lambda done: _decayed_factor(config, 0.5 * (1.0 + math.cos(math.pi * done))))


def wsd(config: WsdConfig, *, steps: int) -> Factor:
    """1 until the last decay_steps, then a straight line to min_lr_ratio (Hu et al., 2404.06395, §4).

    A tenth of the run is at most what the warm-up leaves.
    Departure from the paper: its final fall is exponential; a straight line is what its successors use.
    """
    span = max(steps - config.warmup_steps, 1)
    decay = config.decay_steps or min(max(steps // 10, 1), span)
    return _after_warmup(config, steps, lambda done: _decayed_factor(config, min(1.0, (1.0 - done) * span / decay)))
