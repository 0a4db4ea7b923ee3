"""Metrics as (sum, count) pairs and maxima, which can be added over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Scalar = float | int | Tensor


@dataclass(slots=True)
class Metrics:
    """Sums with their counts, and maxima; tensors stay on their device until `result` reads them."""

    sums: dict[str, tuple[Scalar, Scalar]] = field(default_factory=dict)
    maxima: dict[str, Scalar] = field(default_factory=dict)

    def add(self, name: str, total: Scalar, count: Scalar = 1) -> None:
        """Add `total` over `count` things to the mean called `name`."""
        old_total, old_count = self.sums.get(name, (0, 0))
        self.sums[name] = (old_total + total, old_count + count)

    def peak(self, name: str, value: Scalar) -> None:
        """Keep the largest value seen under `name`."""
        old = self.maxima.get(name, value)
        several = isinstance(old, Tensor) or isinstance(value, Tensor)
        self.maxima[name] = torch.maximum(*map(torch.as_tensor, (old, value))) if several else max(old, value)

    def merge(self, other: Metrics) -> None:
        """Add another record of the same step."""
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, value in other.maxima.items():
            self.peak(name, value)

    def plain(self) -> Metrics:
        """A copy with plain numbers, read from the device."""
        sums: dict[str, tuple[Scalar, Scalar]] = {n: (_number(t), _number(c)) for n, (t, c) in self.sums.items()}
        return Metrics(sums, {name: _number(value) for name, value in self.maxima.items()})

    def result(self) -> dict[str, float]:
        """Plain numbers: means with a count above 0, and maxima."""
        means = {n: float(t) / float(c) for n, (t, c) in self.sums.items() if float(c)}
        return means | {n: float(v) for n, v in self.maxima.items()}


def _number(value: Scalar) -> float | int:
    return value.item() if isinstance(value, Tensor) else value
