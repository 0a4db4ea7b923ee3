"""Preference losses against formulas written from the papers in plain floats; gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm.preference import losses as losses
from runner.interfaces.losses import PreferenceLosses

BETA, SMOOTHING, GAMMA, LAM, ALPHA = 0.3, 0.2, 0.7, 0.4, 0.9


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def nll(x: float) -> float:
    """−log sigmoid(x)."""
    return math.log1p(math.exp(-x)) if x >= 0 else -x + math.log1p(math.exp(x))


def log_odds(mean_logprob: float) -> float:
    p = math.exp(mean_logprob)
    return math.log(p / (1 - p))


# name: (ours, loss in plain floats, (reward of one answer)); c, r: log-probabilities or log-ratios; n, m: lengths
Case = tuple[
    Callable[[Tensor, Tensor, Tensor, Tensor], PreferenceLosses],
    Callable[[float, float, int, int], float],
    Callable[[float, int], float],
]
CASES: dict[str, Case] = {
    "sigmoid": (
        lambda c, r, n, m: losses.sigmoid(c, r, beta=BETA),
        lambda c, r, n, m: nll(BETA * (c - r)),
        lambda x, n: BETA * x,
    ),
    "conservative": (
        lambda c, r, n, m: losses.conservative(c, r, beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, n, m: (1 - SMOOTHING) * nll(BETA * (c - r)) + SMOOTHING * nll(-BETA * (c - r)),
        lambda x, n: BETA * x,
    ),
    "robust": (
        lambda c, r, n, m: losses.robust(c, r, beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, n, m: (
            ((1 - SMOOTHING) * nll(BETA * (c - r)) - SMOOTHING * nll(-BETA * (c - r))) / (1 - 2 * SMOOTHING)
        ),
        lambda x, n: BETA * x,
    ),
    "hinge": (
        lambda c, r, n, m: losses.hinge(c, r, beta=BETA),
        lambda c, r, n, m: max(0.0, 1 - BETA * (c - r)),
        lambda x, n: BETA * x,
    ),
    "ipo": (
        lambda c, r, n, m: losses.ipo(c, r, beta=BETA),
        lambda c, r, n, m: (c - r - 1 / (2 * BETA)) ** 2,
        lambda x, n: BETA * x,
    ),
    "ipo_averaged": (
        lambda c, r, n, m: losses.ipo_averaged(c, r, n, m, beta=BETA),
        lambda c, r, n, m: (c / n - r / m - 1 / (2 * BETA)) ** 2,
        lambda x, n: BETA * x / n,
    ),
    "sigmoid_norm": (
        lambda c, r, n, m: losses.sigmoid_norm(c, r, n, m, beta=BETA),
        lambda c, r, n, m: nll(BETA * (c / n - r / m)),
        lambda x, n: BETA * x / n,
    ),
    "apo_zero": (
        lambda c, r, n, m: losses.apo_zero(c, r, beta=BETA),
        lambda c, r, n, m: 1 - sig(BETA * c) + sig(BETA * r),
        lambda x, n: BETA * x,
    ),
    "apo_down": (
        lambda c, r, n, m: losses.apo_down(c, r, beta=BETA),
        lambda c, r, n, m: sig(BETA * c) + 1 - sig(BETA * (c - r)),
        lambda x, n: BETA * x,
    ),
    "simpo": (
        lambda c, r, n, m: losses.simpo(c, r, n, m, beta=BETA, gamma=GAMMA),
        lambda c, r, n, m: nll(BETA * (c / n - r / m) - GAMMA),
        lambda x, n: BETA * x / n,
    ),
    "orpo": (
        lambda c, r, n, m: losses.orpo(c, r, n, m, lam=LAM),
        lambda c, r, n, m: -c / n + LAM * nll(log_odds(c / n) - log_odds(r / m)),
        lambda x, n: LAM * x / n,
    ),
    "cpo": (
        lambda c, r, n, m: losses.cpo(c, r, beta=BETA, alpha=ALPHA),
        lambda c, r, n, m: nll(BETA * (c - r)) - ALPHA * c,
        lambda x, n: BETA * x,
    ),
    "cpo_averaged": (
        lambda c, r, n, m: losses.cpo_averaged(c, r, n, beta=BETA, alpha=ALPHA),
        lambda c, r, n, m: nll(BETA * (c - r)) - ALPHA * c / n,
        lambda x, n: BETA * x,
    ),
    "bradley_terry": (
        lambda c, r, n, m: losses.bradley_terry(c, r, margin=GAMMA, center_rewards_coef=0.01),
        lambda c, r, n, m: nll(c - r - GAMMA) + 0.01 * (c + r) ** 2,
        lambda x, n: x,
    ),
}

LOGPROB = st.floats(-40, -0.5)
PAIRS = st.lists(st.tuples(LOGPROB, LOGPROB, st.integers(1, 9), st.integers(1, 9)), max_size=5)


def columns(pairs: list[tuple[float, float, int, int]]) -> list[Tensor]:
    """chosen, rejected float64 [P]; their lengths int64 [P]."""
    kinds = (torch.float64, torch.float64, torch.int64, torch.int64)
    return [torch.tensor([p[i] for p in pairs], dtype=kind) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("name", CASES)
@given(PAIRS)
def test_the_formula(name: str, pairs: list[tuple[float, float, int, int]]) -> None:
    ours, loss, reward = CASES[name]
    got = ours(*columns(pairs))
    expected = [
        [loss(*p) for p in pairs],
        [reward(c, n) for c, _, n, _ in pairs],
        [reward(r, m) for _, r, _, m in pairs],
    ]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, torch.tensor(b, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    chosen, rejected, n, m = columns([(-3.0, -2.0, 2, 1), (-0.7, -9.0, 1, 4), (-20.0, -11.0, 7, 7)])
    ours = CASES[name][0]
    inputs = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(lambda c, r: ours(c, r, n, m).losses, inputs)
    assert not any(reward.requires_grad for reward in ours(*inputs, n, m)[1:])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chosen", [-1e4, 0.0, -1e-12])
@pytest.mark.parametrize("rejected", [-1e4, 0.0, -1e-12])
def test_extremes_stay_finite(name: str, chosen: float, rejected: float) -> None:
    c, r = (torch.tensor([x], requires_grad=True) for x in (chosen, rejected))
    one = torch.ones(1)
    got = CASES[name][0](c, r, one, one)
    got.losses.sum().backward()
    grads = [x.grad for x in (c, r) if x.grad is not None]
    assert all(torch.isfinite(x).all() for x in (*got, *grads))


@pytest.mark.parametrize("name", CASES)
def test_pairs_do_not_see_one_another(name: str) -> None:
    pairs = [(-3.0, -2.0, 2, 1), (-0.7, -9.0, 1, 4), (-20.0, -11.0, 7, 7)]
    together = CASES[name][0](*columns(pairs)).losses
    apart = torch.cat([CASES[name][0](*columns([p])).losses for p in pairs])
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(together.flip(0), CASES[name][0](*columns(pairs[::-1])).losses)


def test_no_smoothing_is_dpo() -> None:
    c, r, _, _ = columns([(-3.0, -2.0, 2, 1), (-0.7, -9.0, 1, 4)])
    plain = losses.sigmoid(c, r, beta=BETA).losses
    for smoothed in (losses.conservative, losses.robust):
        torch.testing.assert_close(smoothed(c, r, beta=BETA, label_smoothing=0.0).losses, plain)


def test_robust_is_unbiased_under_flipped_labels() -> None:
    c, r, _, _ = columns([(-3.0, -2.0, 2, 1), (-0.7, -9.0, 1, 4)])
    right, flipped = (losses.robust(*p, beta=BETA, label_smoothing=SMOOTHING).losses for p in ((c, r), (r, c)))
    torch.testing.assert_close((1 - SMOOTHING) * right + SMOOTHING * flipped, losses.sigmoid(c, r, beta=BETA).losses)


@pytest.mark.parametrize("share", [-0.1, 0.5, 0.9])
def test_robust_refuses_labels_that_say_nothing(share: float) -> None:
    with pytest.raises(ValueError, match=r"below 0\.5"):
        losses.robust(torch.zeros(1), torch.zeros(1), beta=BETA, label_smoothing=share)


def test_the_margin_may_differ_per_pair() -> None:
    c, r = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    got = losses.bradley_terry(c, r, margin=torch.tensor([0.0, 2.0], dtype=torch.float64)).losses
    assert got.tolist() == pytest.approx([nll(1.0), nll(-1.0)])


@given(st.lists(st.tuples(st.floats(-20, 20), st.booleans()), max_size=6), st.floats(0, 5))
def test_kto(answers: list[tuple[float, bool]], z: float) -> None:
    d = torch.tensor([x for x, _ in answers], dtype=torch.float64)
    good = torch.tensor([g for _, g in answers], dtype=torch.bool)
    got, rewards = losses.kto(
        d, good, torch.tensor(z, dtype=torch.float64), beta=BETA, desirable_weight=1.5, undesirable_weight=0.5
    )
    expected = [1.5 * (1 - sig(BETA * (x - z))) if g else 0.5 * (1 - sig(BETA * (z - x))) for x, g in answers]
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert rewards.tolist() == pytest.approx([BETA * x for x, _ in answers])


def test_the_gradient_of_kto() -> None:
    d = torch.tensor([1.0, -2.0, 40.0, 0.3], dtype=torch.float64, requires_grad=True)
    good, z = torch.tensor([True, False, True, False]), torch.tensor(0.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: losses.kto(x, good, z, beta=BETA)[0], d)


@pytest.mark.parametrize(("total", "expected"), [(3.0, 0.75), (-3.0, 0.0)])
def test_the_baseline_of_kto_is_a_mean_that_is_never_negative(total: float, expected: float) -> None:
    got = losses.kto_baseline(torch.tensor(total, requires_grad=True), 4)
    assert got.item() == expected and not got.requires_grad
