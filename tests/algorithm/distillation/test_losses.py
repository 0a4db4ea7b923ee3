"""Divergences of whole distributions against sums written out in float64, at their limits, and over a part of the
vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.algorithm import distillation as losses
from runner.algorithm import kl_divergence

pairs = st.tuples(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 9), st.floats(0.1, 8))


def logprobs(seed: int, tokens: int, vocab: int, scale: float) -> tuple[Tensor, Tensor]:
    """Two sets of log-probabilities, float64 [S, V]."""
    generator = torch.Generator().manual_seed(seed)
    raw = scale * torch.randn(2, tokens, vocab, generator=generator, dtype=torch.float64)
    return tuple(torch.log_softmax(raw, -1))  # type: ignore[return-value]


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@given(pairs, st.floats(0.05, 0.95))
@settings(max_examples=40, deadline=None)
def test_each_is_its_sum_written_out(drawn: tuple[int, int, int, float], beta: float) -> None:
    teacher, student = logprobs(*drawn)
    for t, (p, q) in enumerate(zip(teacher.exp().tolist(), student.exp().tolist(), strict=True)):
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        wanted = {
            "forward": (kl_divergence.forward_kl(teacher, student), kl(p, q)),
            "reverse": (kl_divergence.reverse_kl(teacher, student), kl(q, p)),
            "jsd": (kl_divergence.jsd(teacher, student, beta=beta), beta * kl(p, m) + (1 - beta) * kl(q, m)),
        }
        for name, (got, want) in wanted.items():
            assert float(got[t]) == pytest.approx(want, rel=1e-9, abs=1e-12), name


@given(pairs)
@settings(max_examples=20, deadline=None)
def test_jsd_goes_to_the_forward_kl_at_0_and_to_the_reverse_at_1(drawn: tuple[int, int, int, float]) -> None:
    teacher, student = logprobs(*drawn[:3], min(drawn[3], 1.5))
    small = 1e-7
    near_0 = kl_divergence.jsd(teacher, student, beta=small) / small
    near_1 = kl_divergence.jsd(teacher, student, beta=1 - small) / small
    torch.testing.assert_close(near_0, kl_divergence.forward_kl(teacher, student), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(near_1, kl_divergence.reverse_kl(teacher, student), rtol=1e-3, atol=1e-5)


def test_at_one_half_jsd_is_symmetric_and_bounded() -> None:
    teacher, student = logprobs(0, 50, 30, 20.0)
    one, other = kl_divergence.jsd(teacher, student, beta=0.5), kl_divergence.jsd(student, teacher, beta=0.5)
    torch.testing.assert_close(one, other)
    assert float(one.max()) <= math.log(2) and float(one.max()) > 0.5


def test_equal_distributions_have_none_and_no_gradient() -> None:
    raw = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    student = losses.scaled_log_softmax(raw, 2.0)
    for found in (
        kl_divergence.forward_kl(student.detach(), student),
        kl_divergence.reverse_kl(student.detach(), student),
        kl_divergence.jsd(student.detach(), student, beta=0.3),
    ):
        assert float(found.detach().abs().max()) < 1e-12
        (gradient,) = torch.autograd.grad(found.sum(), raw, retain_graph=True)
        assert float(gradient.abs().max()) < 1e-12


@given(pairs, st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_the_teachers_likeliest_tokens_and_the_others_as_one(drawn: tuple[int, int, int, float], k: int) -> None:
    teacher, student = logprobs(*drawn)
    few, same = losses.top_k_with_rest(teacher, student, k)
    torch.testing.assert_close(few.exp().sum(-1), torch.ones(len(few), dtype=torch.float64))
    torch.testing.assert_close(same.exp().sum(-1), torch.ones(len(few), dtype=torch.float64))
    for t in range(len(teacher)):
        order = sorted(range(teacher.shape[1]), key=lambda v: -float(teacher[t, v]))[:k]
        rest = 1 - math.fsum(student[t, order].exp().tolist())
        wanted = sorted([*student[t, order].exp().tolist(), *([rest] if k < teacher.shape[1] else [])])
        assert sorted(same[t].exp().tolist()) == pytest.approx(wanted, abs=1e-9)
    for divergence in (kl_divergence.forward_kl, kl_divergence.reverse_kl):
        part, whole = divergence(few, same), divergence(teacher, student)
        assert bool((part >= -1e-9).all()) and bool((part <= whole + 1e-9).all()), "lumping never adds divergence"


def test_the_gradient_is_finite_where_the_teacher_is_certain() -> None:
    raw = torch.tensor([[0.0, -3.0, 4.0]], requires_grad=True)
    teacher = losses.scaled_log_softmax(torch.tensor([[200.0, -200.0, -200.0]]), 1.0)
    for k in (1, 2, 3):
        pair = losses.top_k_with_rest(teacher, losses.scaled_log_softmax(raw, 1.0), k)
        for found in (
            kl_divergence.forward_kl(*pair),
            kl_divergence.reverse_kl(*pair),
            kl_divergence.jsd(*pair, beta=0.5),
        ):
            (gradient,) = torch.autograd.grad(found.sum(), raw, retain_graph=True)
            assert bool(torch.isfinite(gradient).all()) and float(gradient.abs().max()) > 0


def test_log_probabilities_are_float32_or_better_and_tempered() -> None:
    logits = torch.randn(3, 5, dtype=torch.bfloat16)
    assert losses.scaled_log_softmax(logits, 1.0).dtype == torch.float32
    wanted = torch.log_softmax(logits.double() / 3, -1).float()
    torch.testing.assert_close(losses.scaled_log_softmax(logits, 3.0), wanted)
