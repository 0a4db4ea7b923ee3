"""Hands the policy's weights to the sampler: the trainer's own at lag 0, copies of the last versions beyond.

version v = the weights after v steps;  step s is sampled with version max(s - lag, the first one of this attempt)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor

from runner.protocols import Sampler

T = TypeVar("T")
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class Publisher:
    """Called by the trainer (`publish`) and, ahead of it, by whoever collects (`load_for`)."""

    def __init__(self, weights: Weights, sampler: Sampler, lag: int) -> None:
        self._weights, self._sampler, self._lag = weights, sampler, lag
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._lock = threading.Lock()

    def publish(self, version: int) -> None:
        """The weights after `version` steps are in place. At lag 0 the sampler shares them; else they are copied."""
        if self._lag == 0:
            self._sampler.load(None, version)
            return
        copy = {name: tensor.detach().clone() for name, tensor in self._weights()}
        with self._lock:
            self._kept[version] = copy
            for old in [v for v in self._kept if v < version - self._lag]:
                del self._kept[old]

    def before(self, collect: Callable[[int], T]) -> Callable[[int], T]:
        """`collect`, but with the sampler holding the weights that are due to the step."""

        def loaded(step: int) -> T:
            self.load_for(step)
            return collect(step)

        return loaded

    def load_for(self, step: int) -> None:
        """Give the sampler the weights that `step` is to be sampled with."""
        if self._lag == 0:
            return
        with self._lock:
            version = max(step - self._lag, min(self._kept))
            tensors = self._kept[version]
        self._sampler.load(tensors, version)
