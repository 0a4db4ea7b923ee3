"""Schedules: end points, warm-up, monotony, and agreement with the formula."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.schedule.config import ConstantConfig, CosineConfig, LinearConfig, WsdConfig, constant, cosine, linear, wsd

FALLING = [
    (cosine, CosineConfig(warmup_steps=10, min_lr_ratio=0.1)),
    (linear, LinearConfig(warmup_steps=10, min_lr_ratio=0.1)),
    (wsd, WsdConfig(warmup_steps=10, min_lr_ratio=0.1, decay_steps=20)),
]


@pytest.mark.parametrize(("shape", "config"), FALLING)
def test_rises_to_the_peak_and_falls_towards_the_final_ratio(shape, config) -> None:  # type: ignore[no-untyped-def]
    factor = shape(config, steps=100)
    values = [factor(step) for step in range(101)]
    assert 0 < values[0] < values[9] < 1 and values[10] == pytest.approx(1.0)
    assert values[100] == pytest.approx(0.1) and values[99] > 0.1, "reached one step after the last"
    assert all(a >= b - 1e-12 for a, b in pairwise(values[10:]))


@pytest.mark.parametrize("shape", [linear, cosine, wsd])
@given(steps=st.integers(1, 60), warmup=st.integers(0, 70), decay=st.integers(0, 60))
def test_every_step_learns(shape, steps: int, warmup: int, decay: int) -> None:  # type: ignore[no-untyped-def]
    """Also the last one of a fall to 0, and where the warm-up is longer than the run."""
    more = {"decay_steps": min(decay, max(steps - warmup, 0))} if shape is wsd else {}
    config = {linear: LinearConfig, cosine: CosineConfig, wsd: WsdConfig}[shape](warmup_steps=warmup, **more)
    factor = shape(config, steps=steps)
    assert all(0 < factor(step) <= 1 for step in range(steps))


def test_linear_and_cosine_are_the_formulas() -> None:
    lines, curves = linear(LinearConfig(), steps=10), cosine(CosineConfig(), steps=10)
    assert [lines(s) for s in range(10)] == pytest.approx([1 - s / 10 for s in range(10)])
    assert [curves(s) for s in range(10)] == pytest.approx([0.5 * (1 + math.cos(math.pi * s / 10)) for s in range(10)])


def test_wsd_is_flat_until_its_decay() -> None:
    factor = wsd(WsdConfig(decay_steps=20), steps=100)
    assert [factor(s) for s in range(81)] == pytest.approx([1.0] * 81)
    assert factor(90) == pytest.approx(0.5) and factor(99) == pytest.approx(0.05)
    tenth = wsd(WsdConfig(), steps=100)
    assert tenth(90) == pytest.approx(1.0) and tenth(95) == pytest.approx(0.5)
    late = wsd(WsdConfig(warmup_steps=95), steps=100)
    assert [late(s) for s in range(94, 100)] == pytest.approx([95 / 96, 1.0, 0.8, 0.6, 0.4, 0.2]), "from the peak"


def test_constant_and_a_run_of_one_step() -> None:
    assert [constant(ConstantConfig(warmup_steps=1), steps=3)(s) for s in range(3)] == [0.5, 1.0, 1.0]
    assert cosine(CosineConfig(), steps=1)(0) == 1.0
