"""Importance weights from sampler to trainer, and the numbers of its drift, against loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import Tensor

from runner.algorithm.policy import importance as correction
from runner.algorithm.policy.importance import Level, behavior_log_ratio
from runner.interfaces.losses import ImportanceWeights
from tests.algorithm.ragged import Rows, rows

LOW, HIGH = 0.6, 1.8
Rule = Callable[[Tensor], ImportanceWeights]

RULES: dict[str, tuple[Rule, Callable[[float], tuple[float, bool]]]] = {
    "tis": (lambda x: correction.tis_weights(x, correction_max=HIGH), lambda rho: (min(rho, HIGH), rho > HIGH)),
    "mis": (
        lambda x: correction.mis_weights(x, correction_min=LOW, correction_max=HIGH),
        lambda rho: (rho, False) if LOW <= rho <= HIGH else (0.0, True),
    ),
    "decoupled": (
        lambda x: correction.decoupled_weights(x, correction_max=HIGH),
        lambda rho: (0.0, True) if rho > HIGH else (rho, False),
    ),
    "uncapped": (lambda x: correction.decoupled_weights(x), lambda rho: (rho, False)),
}


def rho_of(ragged: Rows, old: Tensor, sampled: Tensor, level: Level) -> list[float]:
    """The ratio of each token, 1 where nothing is trained."""
    out = [1.0] * len(old)
    for learnt in ragged.learnt:
        ratios = {t: math.exp(old[t].item()) / math.exp(sampled[t].item()) for t in learnt}
        for t in learnt:
            out[t] = math.prod(ratios.values()) if level == "sequence" else ratios[t]
    return out


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@given(rows())
def test_weights_and_what_the_bounds_took(name: str, level: Level, ragged: Rows) -> None:
    old, sampled = ragged.normal(2, scale=0.5)
    rule, expected = RULES[name]
    got = rule(behavior_log_ratio(old, sampled, ragged.mask, ragged.row, level))
    pairs = [expected(rho) for rho in rho_of(ragged, old, sampled, level)]
    torch.testing.assert_close(got.weights, torch.tensor([w for w, _ in pairs], dtype=torch.float64))
    assert got.affected.tolist() == [hit for _, hit in pairs]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_constants(name: str, level: Level) -> None:
    old, sampled = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    mask, row = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    assert not RULES[name][0](behavior_log_ratio(old, sampled, mask, row, level)).weights.requires_grad


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_drift_every_weight_is_one(name: str, level: Level) -> None:
    logprobs, row = torch.tensor([-0.3, -2.0, float("-inf")]), torch.zeros(3, dtype=torch.int64)
    got = RULES[name][0](behavior_log_ratio(logprobs, logprobs, torch.arange(3) < 2, row, level))
    assert got.weights.tolist() == [1, 1, 1] and not got.affected.any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_log_ratios_are_clamped_after_the_sum(level: Level) -> None:
    old, sampled = torch.tensor([30.0, -25.0]), torch.zeros(2)
    got = behavior_log_ratio(old, sampled, torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), level)
    assert got.tolist() == ([20, -20] if level == "token" else [5, 5])


@given(rows())
def test_drift_counts_learnt_tokens(ragged: Rows) -> None:
    old, sampled = ragged.normal(2)
    got = correction.sampler_mismatch(old, sampled, ragged.mask)
    pairs = [(old[t].item(), sampled[t].item()) for learnt in ragged.learnt for t in learnt]
    expected = {
        "logprob_diff": sum(abs(o - mu) for o, mu in pairs),
        "prob_diff": sum(abs(math.exp(o) - math.exp(mu)) for o, mu in pairs),
        "kl": sum(math.exp(o - mu) - 1 - (o - mu) for o, mu in pairs),
    }
    assert {k: total.item() for k, (total, _) in got.items()} == pytest.approx(expected, abs=1e-5)
    assert {count.item() for _, count in got.values()} == {len(pairs)}


def test_the_affected_share_counts_learnt_tokens_only() -> None:
    affected = ImportanceWeights(torch.ones(4), torch.tensor([True, True, False, False]))
    share = correction.affected_counts(affected, torch.tensor([True, False, True, True]))
    assert [x.item() for x in share] == [1, 3]


@given(rows(min_rows=1))
def test_the_effective_sample_size_is_kishs(ragged: Rows) -> None:
    weights = ragged.normal(1)[0].exp()
    kept = weights[ragged.mask].tolist()
    got = correction.effective_sample_size(weights, ragged.mask).item()
    expected = sum(kept) ** 2 / sum(w * w for w in kept) / len(kept) if kept else 0.0
    assert got == pytest.approx(expected)


def test_equal_weights_lose_no_samples_and_one_heavy_weight_all_but_itself() -> None:
    everything = torch.ones(4, dtype=torch.bool)
    equal, heavy = torch.full((4,), 0.3), torch.tensor([1e6, 1e-6, 1e-6, 1e-6])
    assert correction.effective_sample_size(equal, everything).item() == pytest.approx(1)
    assert correction.effective_sample_size(heavy, everything).item() == pytest.approx(0.25)
