"""Sums, smallest values and successors among values that bear the same id; no loop, no read-back from the device.

    ids     7  7  3  7  3          numbered   1  1  0  1  0
    values  1  2  3  4  5          sum_within 7  7  8  7  8        every value meets the sum of its own segment

Legend: K values, one id each (T tokens with their row, N samples with their group).
"""

from __future__ import annotations

import torch
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
