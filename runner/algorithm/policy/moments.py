"""Mean and variance of some of many values, and whitening by them.

Legend: K values (tokens or samples), float [K]; mask bool [K] says which count. What it leaves out is never read: it
may be NaN. Results have the values' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_and_variance(values: Tensor, mask: Tensor, *, ddof: int) -> tuple[Tensor, Tensor]:
    """Both 0-d. ddof 0: the population's variance; 1: Bessel's correction. Of `ddof` or fewer values it is 0, and so is
    the mean of none."""
    count = mask.sum()
    mean = torch.where(mask, values, 0).sum() / count.clamp(min=1)
    return mean, torch.where(mask, values - mean, 0).square().sum() / (count - ddof).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, ddof: int = 0, eps: float = 1e-8) -> Tensor:
    """(x − mean) / √(variance + eps) in the mask and 0 outside it, [K].

    ddof: 0 is the population's variance (OpenRLHF, NeMo-RL); 1 is Bessel's correction (verl).

    Departure: OpenRLHF and NeMo-RL raise a variance below 1e-8 to it, here as in verl 1e-8 is added to every variance.
    Equal values, and a single one, become 0.
    """
    mean, variance = mean_and_variance(values, mask, ddof=ddof)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + eps), 0)
