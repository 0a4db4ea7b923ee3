"""Draws against the distribution they claim, computed another way; and the streams that they read."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.sampler.sampling import BLOCK, TOPK_START, SamplingRule, inverse_cdf, sample_tokens, uniform_stream

LAST = 2**24 - 1  # the largest uniform
LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -4.0, 0.9, 1.9, -0.2, 0.5, -2.5])
RULES = [
    SamplingRule(),
    SamplingRule(temperature=0.5),
    SamplingRule(temperature=2.5),
    SamplingRule(top_k=4),
    SamplingRule(top_p=0.7),
    SamplingRule(min_p=0.25),
    SamplingRule(temperature=1.5, top_k=7, top_p=0.8, min_p=0.3),
]


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.tensor(list(islice(uniform_stream(seed), count)))


def wanted(logits: list[float], rule: SamplingRule) -> np.ndarray:
    """The distribution by the definition, one id at a time from the likeliest down."""
    p = np.exp(np.array(logits) / rule.temperature)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: rule.top_k]
    total, kept, mass = p[order].sum(), [], 0.0
    for i in order:
        if mass < rule.top_p and p[i] >= rule.min_p * p[order[0]]:
            kept.append(i)
        mass += p[i] / total
    out = np.zeros(len(logits))
    out[kept] = p[kept] / p[kept].sum()
    return out


def surprise(counts: np.ndarray, p: np.ndarray) -> float:
    """Pearson's chi-square as a standard normal quantile (Wilson and Hilferty 1931)."""
    assert not counts[p == 0].any()
    n, seen = counts.sum(), p > 0
    chi = float(((counts[seen] - n * p[seen]) ** 2 / (n * p[seen])).sum())
    df = int(seen.sum()) - 1
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_frequencies_follow_the_rule(rule: SamplingRule) -> None:
    count = 40_000
    drawn = sample_tokens(LOGITS.expand(count, -1), numbers(count), rule)
    counts = drawn.ids.bincount(minlength=len(LOGITS)).numpy()
    assert surprise(counts, wanted(LOGITS.tolist(), rule)) < 3.7  # one in ten thousand


def test_the_test_would_notice_another_distribution() -> None:
    drawn = sample_tokens(LOGITS.expand(40_000, -1), numbers(40_000), SamplingRule(temperature=1.05))
    assert surprise(drawn.ids.bincount(minlength=11).numpy(), wanted(LOGITS.tolist(), SamplingRule())) > 3.7


@pytest.mark.parametrize("vocabulary", [BLOCK, BLOCK + 1, 2 * BLOCK - 100])
def test_frequencies_over_several_blocks(vocabulary: int) -> None:
    logits = torch.sin(torch.arange(vocabulary) * 0.7)
    counts = np.zeros(vocabulary)
    for seed in range(4):
        drawn = sample_tokens(logits.expand(5_000, -1), numbers(5_000, seed), SamplingRule())
        counts += drawn.ids.bincount(minlength=vocabulary).numpy()
    assert surprise(counts, wanted(logits.tolist(), SamplingRule())) < 3.7


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logprobs_are_those_of_both_distributions(rule: SamplingRule, dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype).expand(200, -1)
    drawn = sample_tokens(logits, numbers(200), rule, raw=True)
    plain = LOGITS.to(dtype).double().tolist()
    whole = SamplingRule(temperature=rule.temperature)
    under, raw = np.log(wanted(plain, rule) + 1e-300), np.log(wanted(plain, whole))
    assert drawn.raw_logprobs is not None
    assert drawn.logprobs.dtype == drawn.raw_logprobs.dtype == (dtype if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(drawn.logprobs.double(), under[drawn.ids], atol=2e-6)
    np.testing.assert_allclose(drawn.raw_logprobs.double(), raw[drawn.ids], atol=2e-6)
    unasked = sample_tokens(logits, numbers(200), rule)
    assert unasked.raw_logprobs is None and torch.equal(unasked.logprobs, drawn.logprobs)


@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.999])
def test_a_nucleus_may_be_larger_than_where_it_is_first_sought(top_p: float) -> None:
    logits = torch.randn(2 * TOPK_START * 8 + 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    p = wanted(logits.tolist(), SamplingRule(top_p=top_p))
    drawn = sample_tokens(logits.expand(500, -1), numbers(500), SamplingRule(top_p=top_p))
    np.testing.assert_allclose(drawn.logprobs, np.log(p[drawn.ids]), atol=1e-9)
    assert (top_p > 0.1) == (int((p > 0).sum()) > TOPK_START)


def test_a_nucleus_holds_the_likeliest_token_however_small_its_mass() -> None:
    for rule in (SamplingRule(top_p=1e-15), SamplingRule(top_p=1e-15, top_k=4)):
        drawn = sample_tokens(LOGITS.expand(20, -1), numbers(20), rule)
        assert set(drawn.ids.tolist()) == {int(LOGITS.argmax())} and drawn.logprobs.abs().max() == 0


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    for rule in (*RULES, SamplingRule(top_p=0.999)):
        together = sample_tokens(logits, numbers(6), rule)
        for row in range(6):
            alone = sample_tokens(logits[row : row + 1], numbers(6)[row : row + 1], rule)
            assert int(alone.ids) == int(together.ids[row])


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.3, 1.0]), min_size=1, max_size=12).filter(lambda m: max(m) > 0.1),
    st.integers(0, 2 * BLOCK),
    st.sampled_from([0, 2**23, LAST]),
    st.sampled_from([0, 2**23, LAST]),
)
def test_what_has_no_mass_is_never_taken(masses: list[float], gap: int, first: int, second: int) -> None:
    p = torch.tensor([[0.0] * gap + masses + [0.0] * gap], dtype=torch.float32)
    place = inverse_cdf(p / p.sum(), torch.tensor([[first, second]]))
    assert place.shape == (1, 1) and float(p[0, place]) > 0


def test_a_stream_is_a_function_of_its_seed() -> None:
    long, again = list(islice(uniform_stream(7), 300)), list(islice(uniform_stream(7), 150))
    assert again == long[:150] and len(set(long)) == 300
    assert not set(long) & set(islice(uniform_stream(8), 300))
    assert all(0 <= x <= LAST for pair in long for x in pair)


def philox(counter: int, key: int) -> list[int]:
    """Four words of Philox4x64-10, by the paper's definition (Salmon et al. 2011, §3.3)."""
    mask = 2**64 - 1
    x, k = [counter, 0, 0, 0], [key, 0]
    for _ in range(10):
        first, second = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [(second >> 64) ^ x[1] ^ k[0], second & mask, (first >> 64) ^ x[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return x


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_a_stream_never_changes(seed: int) -> None:
    words = [word for counter in range(1, 40) for word in philox(counter, seed)]
    assert list(islice(uniform_stream(seed), len(words))) == [(w >> 40, w % 2**24) for w in words]


def test_pairs_of_a_stream_are_uniform_and_independent() -> None:
    pairs = np.array(list(islice(uniform_stream(2**63 - 1), 50_000)))
    cells = pairs * 10 // 2**24
    counts = np.bincount(cells[:, 0] * 10 + cells[:, 1], minlength=100)
    assert surprise(counts, np.full(100, 0.01)) < 3.7
    assert abs(np.corrcoef(pairs[:-1, 0], pairs[1:, 0])[0, 1]) < 0.02
