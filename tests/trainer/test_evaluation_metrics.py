"""pass@k against enumeration, and the coverage of intervals with planted probabilities."""

from __future__ import annotations

import random
from itertools import combinations
from statistics import fmean

import pytest

from runner.spec.evaluation import HIGH, LOW, ks_of
from runner.trainer.evaluation_metrics import (
    mean_interval,
    pass_at_k,
    pass_metrics,
    ratio_with_interval,
    score_metrics,
    share_interval,
    with_interval,
)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_subsets_in_which_one_passes(samples: int) -> None:
    for passed in range(samples + 1):
        outcomes = [i < passed for i in range(samples)]
        for k in range(1, samples + 1):
            share = fmean(any(subset) for subset in combinations(outcomes, k))
            assert pass_at_k(samples, passed, k) == pytest.approx(share)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_needs_k_samples(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {samples}"):
        pass_at_k(samples, passed, k)


def test_the_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks_of(n) for n in (0, 1, 2, 4, 6, 8)] == [[], [], [2], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (1.0, 4.0)])
def test_intervals_cover_planted_probabilities(a: float, b: float) -> None:
    """1,000 repetitions of 80 questions, whose probabilities are Beta(a, b), with 4 samples each."""
    rng, covered = random.Random(3), dict.fromkeys(("mean@4", "pass@2", "pass@4"), 0)
    fails, truth = 1.0, {}
    for k in range(1, 5):  # E (1 - p)^k = Π (b + i) / (a + b + i)
        fails *= (b + k - 1) / (a + b + k - 1)
        truth["mean@4" if k == 1 else f"pass@{k}"] = 1 - fails
    for _ in range(1000):
        probabilities = [rng.betavariate(a, b) for _ in range(80)]
        found = pass_metrics([[rng.random() < p for _ in range(4)] for p in probabilities])
        for name in covered:
            covered[name] += found[name + LOW] <= truth[name] <= found[name + HIGH]
    assert all(930 <= count <= 970 for count in covered.values()), covered


def test_answers_to_one_question_are_one_observation() -> None:
    """Four equal answers to each question tell no more than one does."""
    one = pass_metrics([[i % 3 == 0] for i in range(30)])
    four = pass_metrics([[i % 3 == 0] * 4 for i in range(30)])
    assert [four[f"mean@4{end}"] for end in ("", LOW, HIGH)] == [one[f"mean@1{end}"] for end in ("", LOW, HIGH)]


def test_an_interval_has_a_width_where_all_agree_and_none_for_a_single_question() -> None:
    low, high = share_interval([1.0] * 20) or (0.0, 0.0)
    assert 0.7 < low < 0.9 and high == pytest.approx(1)
    assert share_interval([1.0]) is mean_interval([1.0]) is None
    assert with_interval("x", [0.5], share=True) == {"x": 0.5} and with_interval("x", [], share=True) == {}
    assert mean_interval([1.0, 3.0, 2.0, 2.0, 4.0]) == pytest.approx((0.9843, 3.8157), abs=0.02)  # scipy.stats.t


@pytest.mark.parametrize("questions", [20, 80])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_the_interval_of_a_reward_of_0_or_1_covers_its_mean(questions: int, p: float) -> None:
    """Student's t covers 87 % of the means at 20 questions and p = 0.1."""
    rng, covered = random.Random(5), 0
    for _ in range(1000):
        found = score_metrics("reward/mean", [[float(rng.random() < p)] for _ in range(questions)])
        covered += found["reward/mean" + LOW] <= p <= found["reward/mean" + HIGH]
    assert 930 <= covered <= 990


def test_the_interval_of_other_rewards_is_students() -> None:
    scores = [[1.0, 0.5], [0.0, 0.0], [1.0, 1.0]]
    assert score_metrics("x", scores) == with_interval("x", [0.75, 0.0, 1.0], share=False)


def test_the_interval_of_a_ratio_covers_it() -> None:
    """1,000 repetitions of 80 questions with 1 to 40 tokens, each of a loss that differs by question."""
    rng, covered = random.Random(4), 0
    for _ in range(1000):
        counts = [rng.randint(1, 40) for _ in range(80)]
        found = ratio_with_interval("loss", [n * (rng.gauss(2, 1) + rng.gauss(0, 1)) for n in counts], counts)
        covered += found["loss" + LOW] <= 2 <= found["loss" + HIGH]
    assert 930 <= covered <= 970
    assert ratio_with_interval("loss", [6.0], [3]) == {"loss": 2.0} and ratio_with_interval("loss", [], []) == {}
