"""Advantages of samples against loops over groups, and the edge cases: unscored, alone, without variance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm.policy import advantages
from tests.algorithm.ragged import NAN, judged, tensors

EPS = 1e-3
LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
Samples = list[tuple[float, int]]


def batch_std(rewards: Tensor, group: Tensor) -> Tensor:
    return advantages.batch_std(rewards, group, advantage_eps=EPS)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean_std": lambda r, g: advantages.group_mean_std(r, g, advantage_eps=EPS),
    "group_mean": advantages.group_mean,
    "leave_one_out": advantages.leave_one_out,
    "batch_std": batch_std,
    "opo": lambda r, g: advantages.opo(r, g, torch.tensor(LENGTHS[: len(r)])),
    "no_baseline": lambda r, g: advantages.no_baseline(r),
}


def reference(name: str, samples: Samples, index: int) -> float:
    """The advantage of one sample, written from the papers."""
    reward, group = samples[index]
    if math.isnan(reward):
        return 0.0
    members = [i for i, (r, g) in enumerate(samples) if g == group and not math.isnan(r)]
    rewards = [samples[i][0] for i in members]
    if name == "no_baseline":
        return reward
    if len(members) == 1:
        return 0.0
    if name == "leave_one_out":
        return reward - statistics.fmean(samples[i][0] for i in members if i != index)
    if name == "opo":
        return reward - sum(LENGTHS[i] * samples[i][0] for i in members) / sum(LENGTHS[i] for i in members)
    centered = reward - statistics.fmean(rewards)
    if name == "group_mean_std":
        return centered / (statistics.stdev(rewards) + EPS)
    scored = [r for r, _ in samples if not math.isnan(r)]
    return centered / (statistics.stdev(scored) + EPS) if name == "batch_std" else centered


@pytest.mark.parametrize("name", FUNCTIONS)
@given(judged())
def test_the_definition(name: str, samples: Samples) -> None:
    expected = torch.tensor([reference(name, samples, i) for i in range(len(samples))], dtype=torch.float64)
    torch.testing.assert_close(FUNCTIONS[name](*tensors(samples)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "opo"])
@given(judged(), st.randoms(use_true_random=False))
def test_the_order_of_samples_and_the_names_of_groups_do_not_matter(name: str, samples: Samples, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(samples)))
    random.shuffle(order)
    direct = FUNCTIONS[name](*tensors(samples))
    shuffled = FUNCTIONS[name](*tensors([(samples[i][0], -3 * samples[i][1]) for i in order]))
    torch.testing.assert_close(shuffled, direct[order], rtol=1e-9, atol=1e-9)


@given(judged(), st.floats(-50, 50), st.floats(0.1, 10))
def test_a_normalized_advantage_ignores_shift_and_scale(samples: Samples, shift: float, scale: float) -> None:
    rewards, group = tensors(samples)
    apart = [_spread(samples, g) > 1e-3 for _, g in samples]  # nearer ones drown in the rounding of the shift
    moved = advantages.group_mean_std(scale * rewards + shift, group, advantage_eps=0.0)
    original = advantages.group_mean_std(rewards, group, advantage_eps=0.0)
    torch.testing.assert_close(moved[apart], original[apart], rtol=1e-6, atol=1e-6)


def _spread(samples: Samples, group: int) -> float:
    """Between the largest and the smallest scored reward of a group."""
    scored = [r for r, g in samples if g == group and not math.isnan(r)]
    return max(scored) - min(scored) if scored else 0.0


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "no_baseline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.7], [NAN] * 3, [0.1, NAN, 0.1, 0.1], [1e-30] * 3, []])
def test_without_signal_the_advantage_is_exactly_zero(name: str, dtype: torch.dtype, rewards: list[float]) -> None:
    group = torch.full((len(rewards),), 5)
    got = FUNCTIONS[name](torch.tensor(rewards, dtype=dtype), group)
    assert got.dtype == dtype
    assert got.tolist() == [0.0] * len(rewards)


def test_rewards_vary_beyond_their_rounding() -> None:
    group = torch.tensor([0, 0, 0, 1, 1])
    rewards = torch.tensor([0.5, 0.5 + 1e-6, 0.5 - 1e-6, 0.5, 0.5001])
    assert advantages.has_variance(rewards, group).all()
    assert advantages.has_variance(rewards, group, 1e-5).tolist() == [False, False, False, True, True]


def test_an_unscored_sample_is_as_if_it_had_not_been_drawn() -> None:
    with_nan, group = torch.tensor([1.0, NAN, 0.0, 0.5]), torch.zeros(4, dtype=torch.int64)
    kept = torch.tensor([0, 2, 3])
    for name in ("group_mean_std", "group_mean", "leave_one_out", "batch_std"):
        got = FUNCTIONS[name](with_nan, group)
        assert got[1] == 0
        torch.testing.assert_close(got[kept], FUNCTIONS[name](with_nan[kept], group[kept]))
