"""Value and gradient on both sides of every bound in a loss: the formula inside, what the docs say beyond.

Each case is a function of one number x, its bounds, and (value, derivative) as plain formulas of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from runner.algorithm.kl_divergence import MAX_LOG_RATIO, k1, k2, k3, k3_plus, k3_ratio
from runner.algorithm.loss_registry import built_in
from runner.algorithm.policy import losses
from runner.algorithm.policy.importance import (
    behavior_log_ratio,
    mis_weights,
    sequence_ratio,
    tis_weights,
    token_ratio,
)
from runner.algorithm.preference.losses import hinge, kto_baseline, orpo

C = MAX_LOG_RATIO
EPS = torch.finfo(torch.float64).eps
Value = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """name: what is bounded; of: x [1] → y [1]; expected: x → (y, dy/dx)."""

    name: str
    of: Callable[[Tensor], Tensor]
    bounds: tuple[float, ...]
    expected: Callable[[float], Value]


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def k3_of(d: float) -> float:
    d = bounded(d, -C, C)
    return math.expm1(-d) + d


def within(x: float) -> float:
    return float(abs(x) <= C)


def clip(advantage: float, dual: float | None) -> Callable[[float], Value]:
    """PPO's loss of the ratio r: −r·A, constant above 1.28 where A > 0, below 0.8 and above `dual` where A < 0."""

    def expected(r: float) -> Value:
        kept = r < 1.28 if advantage > 0 else r > 0.8 and (dual is None or r < dual)
        bound = min(r, 1.28) if advantage > 0 else min(max(r, 0.8), dual or math.inf)
        return -bound * advantage, -advantage * kept

    return expected


def value_loss(v: float) -> Value:
    """Old value 1, return 3, clip 0.5: the worse of two squares, each half."""
    plain, kept = (v - 3) ** 2, (bounded(v, 0.5, 1.5) - 3) ** 2
    return max(plain, kept) / 2, (v - 3) * (plain >= kept)


def orpo_of(mean: float) -> Value:
    """lam 1, against a rejected answer of log odds 0: −p − log σ(log p/(1 − p)), the odds of at most 1 − ε."""
    p = min(mean, -EPS)
    odds = p - math.log(-math.expm1(p))
    return -mean + math.log1p(math.exp(-odds)), -1 - (mean <= -EPS) / (-math.expm1(p)) / (1 + math.exp(odds))


ZERO, TRUE, ROW = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool), torch.zeros(1).long()
HALF = ZERO + math.log(0.5)


def estimator(k: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda d: k(d, ZERO)


def ratio_now(d: Tensor, old: Tensor) -> Tensor:
    return k3_ratio(d, ZERO, token_ratio(d, old))


CASES = [
    Case("k1", estimator(k1), (-C, C), lambda d: (d, 1)),
    Case("k2", estimator(k2), (-C, C), lambda d: (d * d / 2, d)),
    Case("k3", estimator(k3), (-C, C), lambda d: (k3_of(d), -math.expm1(-d) * within(d))),
    Case("k3_plus", estimator(k3_plus), (-C, C), lambda d: (k3_of(d), d)),
    Case("k3_ratio", lambda d: ratio_now(d, d.detach()), (-C, C), lambda d: (k3_of(d), d)),
    Case("k3_ratio, r = 2", lambda d: ratio_now(d, d.detach() + HALF), (-C, C), lambda d: (2 * k3_of(d), 2 * d)),
    Case(
        "token_ratio",
        lambda x: token_ratio(x, ZERO),
        (-C, C),
        lambda x: (math.exp(bounded(x, -C, C)), math.exp(x) * within(x)),
    ),
    Case(
        "sequence_ratio",
        lambda x: sequence_ratio(x, ZERO, TRUE, ROW),
        (-C, C),
        lambda x: (math.exp(bounded(x, -C, C)), math.exp(x) * within(x)),
    ),
    Case(
        "behavior_log_ratio",
        lambda x: behavior_log_ratio(x, ZERO, TRUE, ROW, "sequence") + 0 * x,
        (-C, C),
        lambda x: (bounded(x, -C, C), 0),
    ),
    Case(
        "tis",
        lambda x: tis_weights(x.detach(), correction_max=2.0).weights + 0 * x,
        (math.log(2),),
        lambda x: (min(math.exp(x), 2), 0),
    ),
    Case(
        "mis",
        lambda x: mis_weights(x.detach()).weights + 0 * x,
        (math.log(0.5), math.log(5)),
        lambda x: (math.exp(x) * (0.5 <= math.exp(x) <= 5), 0),
    ),
    *(
        Case(
            f"clip, A = {a}, dual = {dual}",
            lambda r, a=a, dual=dual: losses.ppo_clip(r, ZERO + a, clip_high=0.28, dual_clip=dual)[0],  # type: ignore[misc]
            (0.8, 1.28, 3.0),
            clip(a, dual),
        )
        for a, dual in ((2.0, None), (-2.0, None), (2.0, 3.0), (-2.0, 3.0))
    ),
    Case(
        "cispo",
        lambda x: losses.cispo(x, x.exp(), ZERO - 2, clip_low=0.2)[0],
        (math.log(0.8), math.log(5)),
        lambda x: (2 * bounded(math.exp(x), 0.8, 5) * x, 2 * bounded(math.exp(x), 0.8, 5)),
    ),
    Case("value", lambda v: losses.clipped_value_loss(v, ZERO + 1, ZERO + 3, clip=0.5)[0], (0.5, 1.5), value_loss),
    Case(
        "value, none",
        lambda v: losses.clipped_value_loss(v, ZERO, ZERO + 3, clip=None)[0],
        (3,),
        lambda v: ((v - 3) ** 2 / 2, v - 3),
    ),
    Case("kto_baseline", lambda x: kto_baseline(x, 2) + 0 * x, (0.0,), lambda x: (max(x / 2, 0), 0)),
    Case(
        "hinge",
        lambda d: hinge(d, ZERO, beta=0.5).losses,
        (2.0,),
        lambda d: (max(0, 1 - d / 2), -0.5 * (d < 2)),
    ),
    Case("orpo", lambda p: orpo(p, HALF, ZERO + 1, ZERO + 1, lam=1.0).losses, (-EPS,), orpo_of),
]


def points(bound: float) -> list[float]:
    """Just below and above a bound, further, and far beyond; the bound itself has two derivatives."""
    if bound == -EPS:  # of log p, which is not above 0
        return [0.0, -EPS / 2, -2 * EPS, -1e-9, -1e-3, -1.0]
    near = [bound + sign * distance for distance in (1e-9, 1e-3, 0.5, 1.0, 30.0) for sign in (-1, 1)]
    return [x for x in near if bound < 0 or x > -25] if abs(bound) == C else near


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradient_on_both_sides_of_each_bound(case: Case) -> None:
    for bound in case.bounds:
        for at in points(bound):
            x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
            y = case.of(x)
            [slope] = torch.autograd.grad(y.sum(), x)
            wanted = case.expected(at)
            assert (y.item(), slope.item()) == pytest.approx(wanted, rel=1e-6, abs=1e-12), (case.name, at)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_is_lost_at_a_bound_itself(case: Case) -> None:
    """There the value is that of both sides, and the derivative is one of theirs or between."""
    for bound in case.bounds:
        x = torch.tensor([bound], dtype=torch.float64, requires_grad=True)
        y = case.of(x)
        [slope] = torch.autograd.grad(y.sum(), x)
        if case.name != "mis":  # it drops what is outside
            assert y.item() == pytest.approx(case.expected(bound)[0], rel=1e-6, abs=1e-12)
        low, high = sorted(case.expected(bound + s * max(abs(bound), EPS) * 1e-9)[1] for s in (-1, 1))
        slack = 1e-6 * max(abs(low), abs(high))
        assert low - slack <= slope.item() <= high + slack, (case.name, bound)


def test_every_function_with_a_bound_has_a_case() -> None:
    """A new KL estimator, correction or policy loss gets a case, or is named here as one without a bound."""
    known = {case.name.partition(",")[0] for case in CASES} | {"sapo", "reinforce", "decoupled"}
    for kind in ("kl_estimator", "correction", "policy_loss"):
        assert built_in()[kind].keys() <= known, kind  # type: ignore[index]
