"""What a sweep found: one result per job, read from the jobs' own files; the best of them; seeds folded together."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.checkpoint.config import direction
from runner.folder import shown, write_atomic, write_json
from runner.report.series import PREFERRED, Series, read
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder
from runner.sweep.record import FAILED, FINISHED, JobState, Record

SEED = "seed"
# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond, the normal's.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL95 = 1.96


@dataclass(frozen=True, slots=True)
class Result:
    """One job and what came of it. `value` at `step_of_value` is what ranks it; None where it measured none."""

    job: JobPlan
    state: JobState
    steps: int
    value: float | None
    step_of_value: int | None
    series: Mapping[str, Series]


@dataclass(frozen=True, slots=True)
class Fold:
    """Jobs that differ in their seed only: the mean of their values and half the width of its 95 % interval.

    `half_width` is None for a single value.
    """

    varied: Mapping[str, str]
    values: tuple[float, ...]
    mean: float
    half_width: float | None


@dataclass(frozen=True, slots=True)
class Results:
    """All of a sweep. `best` is None where no job that is done measured the metric."""

    plan: Plan
    folder: SweepFolder
    ranking: Ranking | None
    results: tuple[Result, ...]

    @property
    def best(self) -> Result | None:
        """The winner; the first of equals."""
        ranked = [r for r in self.results if r.state.state == "done" and r.value is not None]
        if self.ranking is None or not ranked:
            return None
        sign = -1.0 if self.ranking.mode == "max" else 1.0
        return min(ranked, key=lambda r: sign * (r.value or 0.0))

    @property
    def failed(self) -> list[Result]:
        """Jobs that ran and failed, were killed, or took too long."""
        return [r for r in self.results if r.state.state in FAILED]

    @property
    def unfinished(self) -> list[Result]:
        """Jobs that a resume goes on with by itself."""
        return [r for r in self.results if r.state.state not in FINISHED | FAILED]


def gather(folder: SweepFolder, plan: Plan, record: Record) -> Results:
    """Read what every job has left so far."""
    series = [read(folder.run(job.index).metrics) for job in plan.jobs]
    ranking = plan.ranking or _common(series, [state.state == "done" for state in record])
    rows = [_result(job, record[job.index], series[job.index], ranking) for job in plan.jobs]
    return Results(plan, folder, ranking, tuple(rows))


def value_of(folder: SweepFolder, plan: Plan, index: int) -> float | None:
    """What ranks one job, as far as it has come; None where it has no such number, or nobody said what ranks."""
    return _result(plan.jobs[index], JobState(), read(folder.run(index).metrics), plan.ranking).value


def folds(results: Results) -> list[Fold]:
    """The jobs that are done, seeds folded together, best first; empty where no seed varies."""
    axes = results.plan.axes
    if SEED not in axes or results.ranking is None:
        return []
    grouped: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for row in results.results:
        if row.state.state == "done" and row.value is not None:
            rest = tuple((k, v) for k, v in row.job.varied.items() if k != SEED)
            grouped.setdefault(rest, []).append(row.value)
    found = [fold(dict(rest), values) for rest, values in grouped.items()]
    return sorted(found, key=lambda f: f.mean, reverse=results.ranking.mode == "max")


def fold(varied: Mapping[str, str], values: Sequence[float]) -> Fold:
    """Mean and 95 % interval of its mean (Student's t): mean ± t · s / √n, s with n − 1."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Fold(varied, tuple(values), mean, None)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
    quantile = T95[count - 2] if count - 2 < len(T95) else NORMAL95
    return Fold(varied, tuple(values), mean, quantile * deviation / math.sqrt(count))


def write_files(results: Results) -> None:
    """Write results.csv and results.json. Raises StorageError."""
    axes = results.plan.axes
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = ["job", *axes, "state", "attempts", "exit_code", "steps", "metric", "value", "step", "seconds", "folder"]
    table.writerow([*names, "error"])
    for row in results.results:
        entry = _entry(results, row)
        varied = [row.job.varied.get(axis, "") for axis in axes]
        table.writerow(
            [row.job.index, *varied, *(_cell(entry[name]) for name in names[1 + len(axes) :]), entry["error"]]
        )
    write_atomic(results.folder.table, text.getvalue())
    best = results.best
    head = {
        "sweep": results.folder.root.name,
        "created": results.plan.created,
        "typed": list(results.plan.typed),
        "axes": axes,
        "metric": None if results.ranking is None else results.ranking.metric,
        "mode": None if results.ranking is None else results.ranking.mode,
        "take": None if results.ranking is None else results.ranking.take,
        "best": None if best is None else best.job.index,
    }
    jobs = [_entry(results, row) | {"varied": dict(row.job.varied), "last": _last(row)} for row in results.results]
    write_json(results.folder.results, head | {"jobs": jobs})


def _entry(results: Results, row: Result) -> dict[str, Any]:
    return {
        "job": row.job.index,
        "state": row.state.state,
        "attempts": row.state.attempts,
        "exit_code": row.state.exit_code,
        "steps": row.steps,
        "metric": None if results.ranking is None else results.ranking.metric,
        "value": row.value,
        "step": row.step_of_value,
        "seconds": row.state.seconds,
        "folder": shown(results.folder.run(row.job.index).root),
        "error": row.state.error,
    }


def _last(row: Result) -> dict[str, float]:
    return {name: series.last[1] for name, series in row.series.items()}


def _cell(value: Any) -> Any:
    return "" if value is None else value


def _common(series: Sequence[Mapping[str, Series]], done: Sequence[bool]) -> Ranking | None:
    """The first of the preferred metrics that all finished jobs have."""
    finished = [of_job for of_job, is_done in zip(series, done, strict=True) if is_done]
    for metric in PREFERRED:
        mode = direction(metric)
        if mode is not None and finished and all(metric in of_job for of_job in finished):
            return Ranking(
                metric, mode, "last", "the first of the usual ones that all jobs have; sweep.metric names another"
            )
    return None


def _result(job: JobPlan, state: JobState, series: Mapping[str, Series], ranking: Ranking | None) -> Result:
    steps = max((s.last[0] for s in series.values()), default=0)
    of_metric = series.get(ranking.metric) if ranking is not None else None
    if ranking is None or of_metric is None:
        return Result(job, state, steps, None, None, series)
    step, value = of_metric.best(ranking.mode) if ranking.take == "best" else of_metric.last
    return Result(job, state, steps, value, step, series)
