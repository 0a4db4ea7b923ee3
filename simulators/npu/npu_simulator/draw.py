"""Random numbers as a function of a seed and an offset, as the card's counter-based generator has them."""

from __future__ import annotations

import torch

STEP = 4  # by which one draw moves the offset
MASK = 2**64 - 1


def stream(seed: int, offset: int) -> torch.Generator:
    """A generator of the host; at offset 0 it is the one that `torch.manual_seed(seed)` starts."""
    return torch.Generator().manual_seed(_mixed(seed & MASK, offset & MASK))


def _mixed(seed: int, offset: int) -> int:
    """The same as `mixed` in kernels.cpp: one round of SplitMix64 (Steele, Lea, Flood 2014)."""
    if offset == 0:
        return seed
    x = (seed + 0x9E3779B97F4A7C15 * offset) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
