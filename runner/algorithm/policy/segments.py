"""Sums, smallest values and successors within segments of equal ids; mean, variance and whitening under a mask.

    ids     7  7  3  7  3          numbered   1  1  0  1  0
    values  1  2  3  4  5          sum_within 7  7  8  7  8        every value meets the sum of its own segment

No loop and no read-back from the device. Legend: K values (tokens or samples), float [K]; `ids` int64 [K], one each
(the row of a token, the group of a sample); mask bool [K]: what it leaves out is never read, and may be NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.interfaces.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def numbered(ids: Tensor) -> Tensor:
    """Ids int64 [K] → int64 [K], equal where they are equal and without gaps: 0, 1, ... in the order of the ids."""
    ordered, order = torch.sort(ids)
    numbers = torch.zeros_like(ids)
    numbers[order[1:]] = torch.cumsum(ordered[1:] != ordered[:-1], 0)
    return numbers


def sum_within(values: Tensor, ids: Tensor) -> Tensor:
    """Values [K], ids int64 [K] → [K]: each segment's sum, at each of its members. Differentiable; keeps the dtype."""
    numbers = numbered(ids)
    return torch.zeros_like(values).index_add(0, numbers, values)[numbers]


def min_within(values: Tensor, ids: Tensor) -> Tensor:
    """Values [K], ids int64 [K] → [K]: each segment's smallest value, at each of its members."""
    numbers = numbered(ids)
    return torch.zeros_like(values).scatter_reduce(0, numbers, values, "amin", include_self=False)[numbers]


def next_within(mask: Tensor, ids: Tensor) -> Tensor:
    """Mask bool [K], ids int64 [K] → int64 [K]: the nearest later member of the segment that is in the mask.

    K where there is none. A segment's members must lie in one run, as a row's tokens do.
    """
    size = len(ids)
    marked = torch.where(mask, torch.arange(size, device=ids.device), size)
    later = torch.cat([marked[1:], marked.new_full((1,), size)])[:size]
    nearest = later.flip(0).cummin(0).values.flip(0)
    same = ids[nearest.clamp(max=size - 1)] == ids if size else mask
    return torch.where(same, nearest, size)


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
