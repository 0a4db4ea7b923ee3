"""Attention over rows end to end: per row, in buckets and under an explicit mask are the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runner.core.prefix_tree import Paths
from runner.model.packed_attention import UnsupportedAttention, bucket_by_length, packed_attention, separate_rows
from tests.model.zoo import CPU


def rows_alone(lengths: list[int]) -> Paths:
    every = torch.arange(sum(lengths))
    return Paths(tuple(lengths), every, every)


def masked(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """The plain way, with a [T, T] mask."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(row))
    mask = (row[:, None] == row) & (place[:, None] >= place)
    if window is not None:
        mask &= place[:, None] - place < window
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None]).transpose(1, 2)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 20),
    kv_heads=st.sampled_from([1, 2, 4]),
    buckets=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_equals_the_mask_in_value_and_gradient(
    lengths: list[int], window: int | None, kv_heads: int, buckets: bool
) -> None:
    torch.manual_seed(len(lengths))
    shape = (1, 4, sum(lengths), 8)
    q = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, kv_heads, *shape[2:], dtype=torch.float64, requires_grad=True) for _ in range(2))
    plan = bucket_by_length(rows_alone(lengths), CPU) if buckets else separate_rows(torch.tensor(lengths))
    got, wanted = plan.attend(q, k, v, window, 0.0, None), masked(q, k, v, lengths, window)
    torch.testing.assert_close(got, wanted)
    c = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad((got * c).sum(), (q, k, v)), torch.autograd.grad((wanted * c).sum(), (q, k, v))
    )


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_buckets_hold_every_token_once_and_pad_less_than_they_hold(lengths: list[int]) -> None:
    plan = bucket_by_length(rows_alone(lengths), CPU)
    assert plan.inverse is not None and plan.index is not None
    assert torch.equal(plan.index[plan.inverse], torch.arange(sum(lengths)))
    assert len(plan.index) == int(plan.buckets.view(-1, 2).prod(1).sum()) <= 2 * sum(lengths)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"is_causal": False}, "not causal"),
        ({"ragged": None}, "pass keywords"),
    ],
)
def test_what_it_cannot_do_is_refused_and_never_ignored(options: dict[str, object], reason: str) -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(UnsupportedAttention, match=reason):
        packed_attention(nn.Identity(), q, q, q, None, **{"ragged": separate_rows(torch.tensor([5])), **options})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedAttention, match="its own attention mask"):
        packed_attention(nn.Identity(), q, q, q, torch.zeros(1, 1, 5, 5), ragged=separate_rows(torch.tensor([5])))
