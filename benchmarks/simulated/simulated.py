"""What waits as a device would keep its host waiting: without a core."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from simulated_config import SimulatedOptimizer, SimulatedSampler
from torch import nn

from runner.interfaces import Decide, Request, Rollout
from runner.optimizer import optimizers
from runner.sampler.torch import TorchSampler


class _Sampler(TorchSampler):
    def __init__(self, config: SimulatedSampler, model: Any, *, decide: Decide) -> None:
        super().__init__(config, model, decide=decide)
        self._seconds = config.seconds

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """The real answers, after at least so many seconds."""
        until = time.monotonic() + self._seconds
        drawn = super().sample(requests)
        time.sleep(max(0.0, until - time.monotonic()))
        return drawn


class _Optimizer(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """A step, after so many seconds."""
        time.sleep(self.seconds)
        return super().step(closure)


def sampler(config: SimulatedSampler, *, model: Any, decide: Decide) -> TorchSampler:
    """See `SimulatedSampler`."""
    return _Sampler(config, model, decide=decide)


def optimizer(
    config: SimulatedOptimizer, *, parameters: Mapping[str, nn.Parameter], decide: Decide
) -> torch.optim.Optimizer:
    """See `SimulatedOptimizer`."""
    made = _Optimizer(optimizers.decay_groups(parameters, config.weight_decay), lr=config.lr, momentum=config.momentum)
    made.seconds = config.seconds
    return made
