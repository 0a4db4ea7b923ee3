"""Statistics of answers to held-out questions: pass@k, and 95 % intervals clustered by question.

The answers to one question are not independent, so a question is one observation: an estimate is the mean over
questions of a number of each, and its variance is that among questions (Miller 2024, "Adding Error Bars to Evals",
§2.2; arXiv 2411.00640).

Legend: Q questions, n samples of a question, c of them pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

from runner.spec.evaluation import HIGH, LOW, ks_of

Z = NormalDist().inv_cdf(0.975)
# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that one of k samples passes, unbiased from n ≥ k samples: 1 − C(n−c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1 (arXiv 2107.03374).
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {passed} of which pass")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t; above 30 degrees within 0.2 % (Abramowitz, Stegun 26.7.5)."""
    return T95[degrees - 1] if degrees <= len(T95) else Z + (Z**3 + Z) / (4 * degrees)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean over questions, by Student's t; None for fewer than two questions."""
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return fmean(values) - half, fmean(values) + half


def share_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of one share (0 to 1) per question; None for fewer than two questions.

    Wilson's interval with the effective sample size p(1−p)/SE² (Korn and Graubard 1998, "Confidence Intervals for
    Proportions with Small Expected Number of Positive Counts"), so that it stays inside 0 to 1 and has a width where
    all questions agree.
    """
    if len(values) < 2:
        return None
    p, squared_error = fmean(values), variance(values) / len(values)
    size = p * (1 - p) / squared_error if squared_error > 0 else float(len(values))
    t2 = t_quantile(len(values) - 1) ** 2
    center = (p + t2 / (2 * size)) / (1 + t2 / size)
    half = math.sqrt(t2 * p * (1 - p) / size + t2**2 / (4 * size**2)) / (1 + t2 / size)
    return max(0.0, center - half), min(1.0, center + half)


def with_interval(name: str, values: Sequence[float], *, share: bool) -> dict[str, float]:
    """The mean over questions under `name`, and the bounds of its interval; nothing for no question."""
    if not values:
        return {}
    bounds = (share_interval if share else mean_interval)(values)
    return {name: fmean(values), **({} if bounds is None else {name + LOW: bounds[0], name + HIGH: bounds[1]})}


def score_metrics(name: str, scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean over questions of their mean score, and its interval: a share's if all scores are 0 or 1."""
    share = all(score in (0, 1) for question in scores for score in question)
    return with_interval(name, [fmean(question) for question in scores], share=share)


def pass_metrics(passed: Sequence[Sequence[bool]]) -> dict[str, float]:
    """mean@n and pass@k of n samples of each question, with intervals. n is that of the first question."""
    samples = len(passed[0])
    metrics = with_interval(f"mean@{samples}", [fmean(question) for question in passed], share=True)
    for k in ks_of(samples):
        values = [pass_at_k(len(question), sum(question), k) for question in passed]
        metrics |= with_interval(f"pass@{k}", values, share=True)
    return metrics


def ratio_with_interval(name: str, amounts: Sequence[float], counts: Sequence[int]) -> dict[str, float]:
    """Σ amounts / Σ counts over questions under `name`, and its interval; nothing for no question.

    The interval of a ratio of means, linearized (Cochran 1977, "Sampling Techniques", §2.11).
    """
    if not amounts:
        return {}
    ratio, mean_count = sum(amounts) / sum(counts), fmean(counts)
    values = [ratio + (a - ratio * count) / mean_count for a, count in zip(amounts, counts, strict=True)]
    return with_interval(name, values, share=False) | {name: ratio}
