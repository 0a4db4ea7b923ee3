"""Segment sums, extremes and successors against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.algorithm.policy.advantages import compact_ids, next_in_segment, segment_min, segment_sum
from tests.algorithm.ragged import Rows, rows

IDS = st.lists(st.sampled_from([5, -1, 0, 10**12]), max_size=12)


@given(IDS)
def test_segments_are_numbered_without_gaps_in_the_order_of_their_ids(ids: list[int]) -> None:
    known = sorted(set(ids))
    assert compact_ids(torch.tensor(ids, dtype=torch.int64)).tolist() == [known.index(i) for i in ids]


@given(IDS, st.integers(0, 2**31))
def test_sums_and_extremes_are_those_of_the_segment(ids: list[int], seed: int) -> None:
    values = torch.randn(len(ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for function, reference in [(segment_sum, sum), (segment_min, min)]:
        expected = [reference([v for v, j in zip(values.tolist(), ids, strict=True) if j == i]) for i in ids]
        got = function(values, torch.tensor(ids, dtype=torch.int64))
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@given(rows())
def test_the_next_token_is_the_nearest_learnt_one_of_the_same_row(ragged: Rows) -> None:
    size = len(ragged.row)
    expected = [
        min((t for t in learnt if t > token), default=size)
        for span, learnt in zip(ragged.spans, ragged.learnt, strict=True)
        for token in span
    ]
    assert next_in_segment(ragged.mask, ragged.row).tolist() == expected


def test_a_last_row_of_one_token_follows_nothing() -> None:
    row = torch.tensor([0, 0, 1])
    assert next_in_segment(torch.ones(3, dtype=torch.bool), row).tolist() == [1, 3, 3]


def test_sums_are_differentiable() -> None:
    ids = torch.tensor([4, 1, 4, 1, 2])
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: segment_sum(x, ids), values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_sums_keep_the_dtype(dtype: torch.dtype) -> None:
    assert segment_sum(torch.ones(3, dtype=dtype), torch.tensor([0, 1, 0])).dtype == dtype
