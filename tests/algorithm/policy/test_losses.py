"""Policy and value losses per token against the papers' formulas, with their gradients and clip masks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm.policy import losses as policy_losses
from runner.algorithm.policy.importance import token_ratio
from runner.algorithm.policy.losses import Diagnostics

LOW, HIGH, DUAL = 0.2, 0.28, 3.0
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Diagnostics]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(r: float, a: float, dual: float | None) -> float:
    value = max(-r * a, -clip(r, 1 - LOW, 1 + HIGH) * a)
    return min(value, -dual * a) if dual is not None and a < 0 else value


# of (logprobs, old, advantages)
LOSSES: dict[str, Loss] = {
    "ppo": lambda new, o, a: policy_losses.ppo_clip(token_ratio(new, o), a, clip_low=LOW, clip_high=HIGH),
    "dual": lambda new, o, a: policy_losses.ppo_clip(
        token_ratio(new, o), a, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
    ),
    "cispo": lambda new, o, a: policy_losses.cispo(new, token_ratio(new, o), a, clip_low=LOW, clip_high=HIGH),
    "reinforce": lambda new, o, a: policy_losses.reinforce(new, a),
}
# of (logprob, ratio, advantage)
VALUES: dict[str, Callable[[float, float, float], float]] = {
    "ppo": lambda new, r, a: ppo(r, a, None),
    "dual": lambda new, r, a: ppo(r, a, DUAL),
    "cispo": lambda new, r, a: -clip(r, 1 - LOW, 1 + HIGH) * a * new,
    "reinforce": lambda new, r, a: -a * new,
}


def gradient(name: str, r: float, a: float) -> float:
    """∂loss/∂l in closed form, with ∂r/∂l = r."""
    if name == "reinforce":
        return -a
    if name == "cispo":
        return -clip(r, 1 - LOW, 1 + HIGH) * a
    stopped = (r < 1 - LOW and a < 0) or (r > 1 + HIGH and a > 0) or (name == "dual" and r > DUAL and a < 0)
    return 0.0 if stopped else -a * r


@pytest.mark.parametrize("name", LOSSES)
@given(st.floats(-5, -0.1), st.floats(-3, 3), st.floats(-4, 4))
def test_value_and_gradient(name: str, logprob: float, log_ratio: float, advantage: float) -> None:
    new = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    loss, _ = LOSSES[name](new, new.detach() - log_ratio, torch.tensor([advantage], dtype=torch.float64))
    loss.backward()
    r = math.exp(log_ratio)
    assert loss.item() == pytest.approx(VALUES[name](logprob, r, advantage), rel=1e-9, abs=1e-12)
    assert new.grad.item() == pytest.approx(gradient(name, r, advantage), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64)
    loss, diagnostics = LOSSES[name](new, new.detach(), advantages)
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)
    assert not any(mask.any() for mask in diagnostics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_diagnostics_are_masks(name: str) -> None:
    new = torch.zeros(2, requires_grad=True)
    loss, diagnostics = LOSSES[name](new, torch.zeros(2), torch.ones(2))
    assert loss.shape == (2,)
    assert set(diagnostics) <= {"clip_frac_dual", "clip_frac_high", "clip_frac_low"}
    assert all(values.dtype == torch.bool and values.shape == (2,) for values in diagnostics.values())


def test_the_masks_of_ppo_are_where_a_bound_took_effect() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0, 12.0])
    advantages = torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    _, got = policy_losses.ppo_clip(ratio, advantages, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL)
    assert got["clip_frac_low"].tolist() == [True, False, False, False, False, False]
    assert got["clip_frac_high"].tolist() == [False, False, False, True, False, False]
    assert got["clip_frac_dual"].tolist() == [False, False, False, False, False, True]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [-1e3, 1e3])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_stay_finite(name: str, log_ratio: float, advantage: float) -> None:
    new = torch.tensor([-3.0], requires_grad=True)
    loss, _ = LOSSES[name](new, new.detach() - log_ratio, torch.tensor([advantage]))
    loss.backward()
    assert torch.isfinite(loss).all() and torch.isfinite(new.grad).all()


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5), st.one_of(st.none(), st.floats(0.01, 3)))
def test_the_value_loss(value: float, old: float, target: float, width: float | None) -> None:
    v = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    o, r = (torch.tensor([x], dtype=torch.float64) for x in (old, target))
    loss, diagnostics = policy_losses.clipped_value_loss(v, o, r, clip=width)
    loss.backward()
    plain = (value - target) ** 2
    bounded = plain if width is None else (old + clip(value - old, -width, width) - target) ** 2
    assert loss.item() == pytest.approx(0.5 * max(plain, bounded), rel=1e-9, abs=1e-12)
    if bounded > plain * (1 + 1e-9) + 1e-12:
        assert v.grad.item() == 0 and diagnostics["clipped"].item()
    elif plain > bounded * (1 + 1e-9) + 1e-12 or width is None:
        assert v.grad.item() == pytest.approx(value - target) and not diagnostics["clipped"].item()


def test_entropy_lowers_the_loss() -> None:
    entropy = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    loss = policy_losses.entropy_bonus(entropy, 0.1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-0.05, -0.2])
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.1])
