"""Shaping of lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.reward.config import LengthConfig
from runner.reward.rules import soft_overlong_penalty, target_length_reward
from tests.reward.samples import answer, scores


@given(st.integers(0, 400), st.integers(1, 200), st.integers(1, 200))
def test_overlong_is_dapos_formula(length: int, most: int, cache: int) -> None:
    if length <= most - cache:  # equation 13 of the paper
        expected = 0.0
    elif length <= most:
        expected = ((most - cache) - length) / cache
    else:
        expected = -1.0
    assert soft_overlong_penalty(length, most, cache) == expected


@given(st.integers(0, 400), st.integers(1, 200))
def test_nearness_is_best_at_the_target_and_bounded(length: int, target: int) -> None:
    assert -1 <= target_length_reward(length, target) <= 0
    assert (target_length_reward(length, target) == 0) == (length == target)
    assert (
        target_length_reward(0, target)
        == target_length_reward(2 * target, target)
        == target_length_reward(5 * target, target)
        == -1
    )


def test_tokens_are_counted_and_not_characters() -> None:
    group = [answer("x" * 50, tokens=n) for n in (6, 8, 9, 10, 11)]
    assert scores(LengthConfig(max_length=10, overlong_buffer_len=4), *group) == [0, -0.5, -0.75, -1, -1]
    assert scores(LengthConfig(target=8), *group) == [-0.25, 0, -0.125, -0.25, -0.375]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, ["reward.max_length"]),
        ({"max_length": 10}, ["reward.overlong_buffer_len"]),
        ({"overlong_buffer_len": 10}, ["reward.max_length"]),
        ({"max_length": 10, "overlong_buffer_len": 11}, ["reward.overlong_buffer_len"]),
        (
            {"max_length": 10, "overlong_buffer_len": 5, "target": 3},
            ["reward.max_length", "reward.overlong_buffer_len"],
        ),
        ({"max_length": 10, "overlong_buffer_len": 10}, []),
        ({"target": 3}, []),
    ],
)
def test_options_that_do_not_go_together_are_problems(options: dict[str, int], keys: list[str]) -> None:
    assert [key for key, _ in LengthConfig(**options).problems(None)] == keys
