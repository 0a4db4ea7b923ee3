"""Means and variances of some of many values: sums that add up, then what follows from them.

    values, mask ──moments──▶ (sum, sumsq, size) ──▶ whiten

Legend: K values (tokens or samples). A difference of large sums loses digits: where a mean may exceed its
standard deviation a thousandfold, pass float64 values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Sum, sum of squares and number of some values; 0-d tensors. Those of two sets of values add up field by field."""

    sum: Tensor
    sumsq: Tensor
    size: Tensor


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Values float [K], mask bool [K] → the moments of the values in the mask, in the values' dtype.

    What the mask leaves out is never read: it may be NaN.
    """
    kept = torch.where(mask, values, 0)
    return Moments(kept.sum(), kept.square().sum(), mask.sum().to(values.dtype))


def mean(of: Moments) -> Tensor:
    """0-d; 0 of no values."""
    return of.sum / of.size.clamp(min=1)


def variance(of: Moments, ddof: int) -> Tensor:
    """0-d and never negative. ddof 0: population; 1: Bessel's correction. 0 of `ddof` or fewer values."""
    return (of.sumsq - of.sum * mean(of)).clamp(min=0) / (of.size - ddof).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, over: Moments, *, ddof: int = 0, eps: float = 1e-8) -> Tensor:
    """(x − mean) / √(variance + eps) in the mask and 0 outside it; values float [K], mask bool [K] → float [K].

    over: the moments of all values of the step.
    ddof: 0 is the population's variance (OpenRLHF, NeMo-RL); 1 is Bessel's correction (verl).

    Departure: OpenRLHF and NeMo-RL raise a variance below 1e-8 to it, here as in verl 1e-8 is added to every variance.
    Equal values, and a single one, become 0.
    """
    return torch.where(mask, (values - mean(over)) * torch.rsqrt(variance(over, ddof) + eps), 0)
