"""Random ragged rows for the tests of the mathematics: lengths, masks and float64 values drawn by hypothesis.

Legend: T tokens, N rows or samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """row int64 [T], mask bool [T]; `normal` draws float64 values of any size from the example's own stream."""

    masks: list[list[bool]]
    seed: int

    @property
    def row(self) -> Tensor:
        return torch.tensor([n for n, mask in enumerate(self.masks) for _ in mask], dtype=torch.int64)

    @property
    def mask(self) -> Tensor:
        return torch.tensor([bit for mask in self.masks for bit in mask], dtype=torch.bool)

    @property
    def spans(self) -> list[range]:
        """The tokens of each row."""
        ends = list(accumulate(len(mask) for mask in self.masks))
        return [range(end - len(mask), end) for mask, end in zip(self.masks, ends, strict=True)]

    @property
    def learnt(self) -> list[list[int]]:
        """The trained tokens of each row."""
        mask = self.mask.tolist()
        return [[t for t in span if mask[t]] for span in self.spans]

    def normal(self, count: int, size: int | None = None, scale: float = 1.0) -> list[Tensor]:
        """`count` float64 tensors of `size` (T unless told otherwise)."""
        generator = torch.Generator().manual_seed(self.seed)
        width = sum(map(len, self.masks)) if size is None else size
        return list(scale * torch.randn(count, width, generator=generator, dtype=torch.float64))


def rows(max_rows: int = 5, max_length: int = 9, min_rows: int = 0) -> st.SearchStrategy[Rows]:
    """Ragged rows with masks that have gaps, empty ones included."""
    mask = st.lists(st.booleans(), min_size=1, max_size=max_length)
    return st.builds(Rows, st.lists(mask, min_size=min_rows, max_size=max_rows), st.integers(0, 2**31))


NAN = float("nan")


def judged(min_samples: int = 0) -> st.SearchStrategy[list[tuple[float, int]]]:
    """(reward, group) of some samples: few distinct rewards, so that equal ones are common; NaN is unscored."""
    reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, NAN]), st.floats(-100, 100))
    return st.lists(st.tuples(reward, st.sampled_from([7, 3, -2, 900])), min_size=min_samples, max_size=12)


def tensors(samples: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    """Rewards float64 [N], groups int64 [N]."""
    rewards = torch.tensor([r for r, _ in samples], dtype=torch.float64)
    return rewards, torch.tensor([g for _, g in samples], dtype=torch.int64)
