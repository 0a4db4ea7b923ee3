"""Means, variances and whitening, against the statistics module."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.algorithm.policy.advantages import masked_mean_and_variance, whiten
from tests.algorithm.ragged import Rows, rows


@given(rows(min_rows=1), st.sampled_from([0, 1]), st.floats(-50, 50))
def test_whitening_is_by_the_mean_and_variance_of_what_counts(ragged: Rows, ddof: int, shift: float) -> None:
    mask = ragged.mask
    values = ragged.normal(1)[0] + shift
    got = whiten(values, mask, ddof=ddof)
    kept = values[mask].tolist()
    if not kept:
        assert got.eq(0).all()
        return
    center = statistics.fmean(kept)
    spread = math.fsum((x - center) ** 2 for x in kept) / max(len(kept) - ddof, 1)
    expected = [
        (x - center) / math.sqrt(spread + 1e-8) if m else 0.0
        for x, m in zip(values.tolist(), mask.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("ddof", "reference"), [(0, statistics.pvariance), (1, statistics.variance)])
def test_the_variance_is_the_populations_or_bessel_corrected(ddof: int, reference) -> None:  # type: ignore[no-untyped-def]
    values = torch.tensor([3.0, 4.5, -1.0, 0.25], dtype=torch.float64)
    mean, got = masked_mean_and_variance(values, torch.ones(4, dtype=torch.bool), ddof=ddof)
    assert got.item() == pytest.approx(reference(values.tolist()), rel=1e-12)
    assert mean.item() == pytest.approx(statistics.fmean(values.tolist()), rel=1e-12)


def test_what_is_masked_out_is_never_read() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf")], dtype=torch.float64)
    mask = torch.tensor([True, False, True, False])
    assert [x.item() for x in masked_mean_and_variance(values, mask, ddof=1)] == [2.0, 2.0]
    torch.testing.assert_close(whiten(values, mask), torch.tensor([-1.0, 0, 1.0, 0], dtype=torch.float64))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_values_and_too_few_whiten_to_zero(count: int, ddof: int) -> None:
    values = torch.full((3,), 0.1, dtype=torch.float64)
    mask = torch.arange(3) < count
    assert whiten(values, mask, ddof=ddof).abs().max() < 1e-9
