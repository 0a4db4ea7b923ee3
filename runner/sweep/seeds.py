"""Jobs that differ in their seed only, folded together: the mean of each metric and how well it is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.sweep.results import Result, Results

SEED = "seed"
INTERVAL = "mean ± 95 % interval of the mean (Student's t)"
# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond, the normal's.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL95 = 1.96


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and half the width of its 95 % interval, None for a single value."""

    value: float
    half_width: float | None


@dataclass(frozen=True, slots=True)
class Fold:
    """Jobs that differ in their seed only, and a mean per ranking: of the `seeds` that are done and have values."""

    varied: Mapping[str, str]
    jobs: int
    seeds: int
    means: tuple[Mean, ...]


def folds(results: Results) -> list[Fold]:
    """The jobs that are done, seeds folded together, best by the first ranking first; empty where no seed varies."""
    if SEED not in results.plan.axes or not results.rankings:
        return []
    grouped: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for row in results.results:
        rest = tuple((k, v) for k, v in row.job.varied.items() if k != SEED)
        grouped.setdefault(rest, []).append(row)
    found = [fold for rest, rows in grouped.items() if (fold := _fold(dict(rest), rows)) is not None]
    return sorted(found, key=lambda f: f.means[0].value, reverse=results.rankings[0].mode == "max")


def mean(values: Sequence[float]) -> Mean:
    """Mean and 95 % interval of the mean (Student's t): mean ± t · s / √n, s with n − 1."""
    count = len(values)
    middle = math.fsum(values) / count
    if count == 1:
        return Mean(middle, None)
    deviation = math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (count - 1))
    quantile = T95[count - 2] if count - 2 < len(T95) else NORMAL95
    return Mean(middle, quantile * deviation / math.sqrt(count))


def _fold(varied: Mapping[str, str], rows: Sequence[Result]) -> Fold | None:
    """None where no job has values."""
    values = [row.values for row in rows if row.state.state == "done" and row.values is not None]
    if not values:
        return None
    return Fold(varied, len(rows), len(values), tuple(map(mean, zip(*values, strict=True))))
