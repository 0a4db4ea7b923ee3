"""KL estimators: values and gradients in closed form, and what they estimate."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm import kl_divergence
from runner.algorithm.policy.importance import token_ratio


def corrected(logprobs: Tensor, reference: Tensor) -> Tensor:
    return kl_divergence.k3_ratio(logprobs, reference, token_ratio(logprobs, logprobs.detach()))


def value_of_k3(d: float) -> float:
    return math.exp(-d) - 1 + d


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[float], float], Callable[[float], float]]] = {
    "k1": (kl_divergence.k1, lambda d: d, lambda d: 1.0),
    "k2": (kl_divergence.k2, lambda d: d * d / 2, lambda d: d),
    "k3": (kl_divergence.k3, value_of_k3, lambda d: 1 - math.exp(-d)),
    "k3 with ratio": (corrected, value_of_k3, lambda d: d),
    "k3+": (kl_divergence.k3_plus, value_of_k3, lambda d: d),
}


@pytest.mark.parametrize("name", CASES)
@given(st.floats(-12, -1e-3) | st.floats(1e-3, 12), st.floats(-30, 0))
def test_value_and_gradient(name: str, d: float, reference: float) -> None:
    estimator, value, gradient = CASES[name]
    f = torch.tensor([reference], dtype=torch.float64)
    new = (f + d).requires_grad_()
    got = estimator(new, f)
    got.backward()
    assert got.item() == pytest.approx(value(d), rel=1e-9, abs=1e-12)
    assert new.grad.item() == pytest.approx(gradient(d), rel=1e-9, abs=1e-12)


def test_a_ratio_other_than_one_scales_k3_and_carries_gradient() -> None:
    new, f, old = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.7, -1.4))
    new.requires_grad_()
    got = kl_divergence.k3_ratio(new, f, token_ratio(new, old))
    got.backward()
    r, d = math.exp(0.4), 0.7
    assert got.item() == pytest.approx(r * value_of_k3(d))
    assert new.grad.item() == pytest.approx(r * value_of_k3(d) + r * (1 - math.exp(-d)))


def test_on_policy_expectations_are_the_kl_and_its_gradient() -> None:
    """Exact sums over a vocabulary: k1 and k3 estimate KL; gradients of k2, k3+ and ratio-corrected k3 that of KL."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    f = other.log_softmax(0)
    new = logits.log_softmax(0)
    exact = (new.exp() * (new - f)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    probability = new.exp().detach()
    for name in ("k1", "k3", "k3 with ratio", "k3+"):
        torch.testing.assert_close((probability * CASES[name][0](new, f)).sum(), exact)
    for name in ("k2", "k3 with ratio", "k3+"):
        (got,) = torch.autograd.grad((probability * CASES[name][0](new, f)).sum(), logits, retain_graph=True)
        torch.testing.assert_close(got, gradient)
    (useless,) = torch.autograd.grad((probability * kl_divergence.k1(new, f)).sum(), logits, retain_graph=True)
    assert useless.abs().max() < 1e-12


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("d", [-1e4, 1e4])
def test_extreme_differences_stay_finite(name: str, d: float) -> None:
    new = torch.tensor([d], requires_grad=True)
    got = CASES[name][0](new, torch.zeros(1))
    got.backward()
    assert torch.isfinite(got).all() and torch.isfinite(new.grad).all()


def test_k3_is_never_negative_and_exact_for_small_differences_in_float32() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-4, 0.0])
    got = kl_divergence.k3(d, torch.zeros(4))
    assert (got >= 0).all()
    torch.testing.assert_close(got[:2], d[:2].square() / 2, rtol=1e-3, atol=1e-10)
