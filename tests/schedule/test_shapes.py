"""Schedules: end points, warm-up, monotony, and agreement with the formula."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from runner.schedule.config import ConstantConfig, CosineConfig, LinearConfig, WsdConfig
from runner.schedule.shapes import constant, cosine, linear, wsd

FALLING = [
    (cosine, CosineConfig(warmup_steps=10, final_ratio=0.1)),
    (linear, LinearConfig(warmup_steps=10, final_ratio=0.1)),
    (wsd, WsdConfig(warmup_steps=10, final_ratio=0.1, decay_steps=20)),
]


@pytest.mark.parametrize(("shape", "config"), FALLING)
def test_rises_to_the_peak_and_falls_to_the_final_ratio(shape, config) -> None:  # type: ignore[no-untyped-def]
    factor = shape(config, steps=100)
    values = [factor(step) for step in range(100)]
    assert 0 < values[0] < values[9] < 1 and values[10] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.1)
    assert all(a >= b - 1e-12 for a, b in pairwise(values[10:]))


def test_cosine_is_the_formula() -> None:
    factor = cosine(CosineConfig(), steps=11)
    assert [factor(s) for s in range(11)] == pytest.approx([0.5 * (1 + math.cos(math.pi * s / 10)) for s in range(11)])


def test_wsd_is_flat_until_its_decay() -> None:
    factor = wsd(WsdConfig(decay_steps=20), steps=101)
    assert [factor(s) for s in range(81)] == pytest.approx([1.0] * 81)
    assert factor(90) == pytest.approx(0.5) and factor(100) == pytest.approx(0.0)


def test_constant_and_a_run_of_one_step() -> None:
    assert [constant(ConstantConfig(warmup_steps=1), steps=3)(s) for s in range(3)] == [0.5, 1.0, 1.0]
    assert cosine(CosineConfig(), steps=1)(0) == 1.0
