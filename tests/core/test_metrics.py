"""Metrics add up whatever way they are grouped."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.core.metrics import Metrics

pairs = st.lists(st.tuples(st.integers(-100, 100), st.integers(1, 10)), min_size=1, max_size=20)


def record(chunk: list[tuple[int, int]]) -> Metrics:
    metrics = Metrics()
    for total, count in chunk:
        metrics.add("a", total, count)
        metrics.peak("m", total)
    return metrics


@given(pairs, st.integers(1, 19))
def test_grouping_does_not_matter(values: list[tuple[int, int]], cut: int) -> None:
    whole = record(values).result()
    parts = record(values[:cut])
    parts.merge(record(values[cut:]))
    assert parts.result() == whole
    assert whole["a"] == sum(t for t, _ in values) / sum(c for _, c in values)
    assert whole["m"] == max(t for t, _ in values)


def test_nothing_counted_is_absent_and_tensors_are_read_once() -> None:
    metrics = Metrics()
    metrics.add("empty", 0.0, 0)
    metrics.add("tensor", torch.tensor(3.0), torch.tensor(2))
    assert "empty" not in metrics.result()
    assert metrics.result()["tensor"] == 1.5
