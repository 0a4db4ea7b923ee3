"""Results of a sweep: one per job, read from the jobs' files; the best job; means over seeds.

With one ranking there is a best job; with several, a Pareto front: the jobs that no other job beats in all rankings.
"""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.checkpoint.config import direction
from runner.run_dir.folder import display_path, write_atomic, write_json
from runner.sweep.job import FAILED
from runner.sweep.plan import JobPlan, JobState, Plan, Ranking, SweepFolder, SweepState
from runner.tools.report.run_facts import PREFERRED, Series
from runner.tools.report.run_facts import read_metrics as read_series
from runner.trainer.evaluation_metrics import t_quantile

SEED = "seed"
INTERVAL = "mean ± 95 % interval of the mean (Student's t)"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Score:
    """A job's value of one ranking, NaN if it is not finite, and its step."""

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Result:
    """One job and its result; one score per ranking, None if the metric never had a finite value."""

    job: JobPlan
    state: JobState
    steps: int
    scores: tuple[Score | None, ...]
    series: Mapping[str, Series]

    @property
    def values(self) -> tuple[float, ...] | None:
        """Its value by each ranking; None if one is missing or not finite, or there is no ranking."""
        found = tuple(score.value for score in self.scores if score is not None and math.isfinite(score.value))
        return found if found and len(found) == len(self.scores) else None


@dataclass(frozen=True, slots=True)
class Results:
    """The results of all jobs of a sweep."""

    plan: Plan
    folder: SweepFolder
    rankings: tuple[Ranking, ...]
    results: tuple[Result, ...]

    @property
    def best(self) -> Result | None:
        """The best job, the first of equals.

        None with several rankings, if no finished job has a value, or if all of several have the same.
        """
        front = self.pareto_front
        return front[0] if len(self.rankings) == 1 and front and not self.equal_jobs else None

    @property
    def equal_jobs(self) -> int:
        """The number of finished jobs with values, if they are several and all values are equal; else 0."""
        found = [row.values for row in self.results if row.state.state == "done" and row.values is not None]
        return len(found) if len(found) > 1 and len(set(found)) == 1 else 0

    @property
    def pareto_front(self) -> list[Result]:
        """Finished jobs that no other job beats in all rankings, in the order of the first ranking."""
        signs = [-1.0 if ranking.mode == "max" else 1.0 for ranking in self.rankings]  # less is better then
        done = [(r, r.values) for r in self.results if r.state.state == "done" and r.values is not None]
        ranked = [(tuple(map(operator.mul, signs, values)), result) for result, values in done]
        kept: list[tuple[tuple[float, ...], Result]] = []
        for losses, result in sorted(ranked, key=lambda pair: pair[0]):  # stable; what beats one comes before it
            if not any(all(a <= b for a, b in zip(other, losses, strict=True)) for other, _ in kept):
                kept.append((losses, result))
        return [result for _, result in kept]

    @property
    def failed_jobs(self) -> list[Result]:
        """Jobs that failed, were killed, or timed out."""
        return [r for r in self.results if r.state.state in FAILED]


def read_results(folder: SweepFolder, plan: Plan, record: SweepState) -> Results:
    """Read the results of every job so far."""
    series = [read_series(folder.run(job.index).metrics) for job in plan.jobs]
    rankings = plan.rankings or _default_rankings(series, [state.state == "done" for state in record])
    rows = [_result(folder, job, record[job.index], series[job.index], rankings) for job in plan.jobs]
    return Results(plan, folder, rankings, tuple(rows))


def ranking_values(folder: SweepFolder, plan: Plan, index: int) -> tuple[float, ...] | None:
    """The current values of one job, one per ranking; None if one is missing."""
    return _result(folder, plan.jobs[index], JobState(), read_series(folder.run(index).metrics), plan.rankings).values


def write_files(results: Results) -> None:
    """Write results.csv and results.json. Raises StorageError."""
    _write_table(results)
    best = results.best
    head = {
        "sweep": results.folder.root.name,
        "created": results.plan.created,
        "typed": list(results.plan.typed),
        "axes": results.plan.axes,
        "rankings": [{"metric": r.metric, "mode": r.mode, "take": r.take} for r in results.rankings],
        "best": None if best is None else best.job.index,
        "front": [row.job.index for row in results.pareto_front],
    }
    write_json(results.folder.results, head | {"jobs": [_entry(results, row) for row in results.results]})


def _write_table(results: Results) -> None:
    axes, metrics = results.plan.axes, [ranking.metric for ranking in results.rankings]
    before, after = ["state", "attempts", "exit_code", "steps"], ["best", "seconds", "folder", "error"]
    scores = [name for metric in metrics for name in (metric, f"{metric} step")]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["job", *axes, *before, *scores, *after])
    front = {row.job.index for row in results.pareto_front}
    for row in results.results:
        entry = _entry(results, row) | {"best": "yes" if row.job.index in front else ""}
        pairs = [(None, None) if score is None else (score.value, score.step) for score in row.scores]
        cells = [*(entry[name] for name in before), *(cell for pair in pairs for cell in pair)]
        cells += [entry[name] for name in after]
        varied = [row.job.varied.get(axis, "") for axis in axes]
        table.writerow([row.job.index, *varied, *("" if cell is None else cell for cell in cells)])
    write_atomic(results.folder.table, text.getvalue())


def _entry(results: Results, row: Result) -> dict[str, Any]:
    scored = zip(results.rankings, row.scores, strict=True)
    return {
        "job": row.job.index,
        "varied": dict(row.job.varied),
        "state": row.state.state,
        "attempts": row.state.attempts,
        "exit_code": row.state.exit_code,
        "steps": row.steps,
        "scores": {r.metric: None if s is None else {"value": _finite(s.value), "step": s.step} for r, s in scored},
        "seconds": row.state.seconds,
        "folder": display_path(results.folder.run(row.job.index).root),
        "error": row.state.error,
        "last": {name: _finite(series.last[1]) for name, series in row.series.items()},
    }


def _finite(value: float) -> float | None:
    """The value for JSON, as in metrics.jsonl: null if it is not finite."""
    return value if math.isfinite(value) else None


def _default_rankings(series: Sequence[Mapping[str, Series]], done: Sequence[bool]) -> tuple[Ranking, ...]:
    """The first of the preferred metrics that all finished jobs have."""
    finished = [of_job for of_job, is_done in zip(series, done, strict=True) if is_done]
    why = "the first usual metric that all jobs have; to change it: sweep.metric=NAME"
    for metric in PREFERRED:
        mode = direction(metric)
        if mode is not None and finished and all(metric in of_job for of_job in finished):
            return (Ranking(metric, mode, "last", why),)
    return ()


def _result(
    folder: SweepFolder, job: JobPlan, state: JobState, series: Mapping[str, Series], rankings: Sequence[Ranking]
) -> Result:
    steps, saved = max((s.last[0] for s in series.values()), default=0), folder.run(job.index).saved_steps
    return Result(job, state, steps, tuple(_score(series.get(r.metric), r, saved) for r in rankings), series)


def _score(series: Series | None, ranking: Ranking, saved: Collection[int]) -> Score | None:
    """The best value counts if it has a checkpoint; the best saved one is never deleted."""
    trained = None if series is None else replace(series, points=tuple(p for p in series.points if p[0] > 0))
    if trained is None or not trained.points:
        return None  # step 0 is the evaluation before training, which does not count
    if ranking.take == "last":
        return Score(trained.last[1], trained.last[0])
    kept = tuple(point for point in trained.points if point[0] in saved)  # none: before the first, or all were deleted
    step, value = replace(trained, points=kept or trained.points).best(ranking.mode)
    return Score(value, step)


class MetricsTail:
    """The newest step and the newest value of each metric of one job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1  # its inode: a resumed run replaces the file
        self._offset = 0
        self.step = 0
        # The first step that was read: earlier steps of a resumed job do not count for its pace.
        self.first: int | None = None
        self.values: dict[str, float] = {}
        self.steps: dict[str, int] = {}  # metric → the step of its newest value

    @property
    def steps_made(self) -> int:
        """Number of steps since the first read."""
        return self.step - (self.step if self.first is None else self.first)

    def read(self) -> None:
        """Read new lines."""
        try:
            with self._path.open("rb") as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._file:
                    self._file, self._offset, self.step, self.values, self.steps = inode, 0, 0, {}, {}
                file.seek(self._offset)
                content = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # a damaged line, which the results report
                row = json.loads(line)
                self.step = int(row.pop("step", self.step))
                measured = {name: value for name, value in row.items() if isinstance(value, int | float)}
                self.values |= measured
                self.steps |= dict.fromkeys(measured, self.step)
        self.first = self.step if self.first is None else min(self.first, self.step)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and half the width of its 95 % interval, None for a single value."""

    value: float
    half_width: float | None


@dataclass(frozen=True, slots=True)
class SeedAggregate:
    """Jobs that differ only in their seed, with one mean per ranking over the finished `seeds`."""

    varied: Mapping[str, str]
    jobs: int
    seeds: int
    means: tuple[Mean, ...]


def aggregate_seeds(results: Results) -> list[SeedAggregate]:
    """Finished jobs with seeds averaged, best first by the first ranking; without seeds, each job."""
    if not results.rankings:
        return []
    grouped: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for row in results.results:
        rest = tuple((k, v) for k, v in row.job.varied.items() if k != SEED)
        grouped.setdefault(rest, []).append(row)
    found = [fold for rest, rows in grouped.items() if (fold := _aggregate(dict(rest), rows)) is not None]
    return sorted(found, key=lambda f: f.means[0].value, reverse=results.rankings[0].mode == "max")


def mean_with_interval(values: Sequence[float]) -> Mean:
    """Mean and 95 % interval of the mean (Student's t): mean ± t · s / √n, s with n − 1."""
    count, middle = len(values), statistics.fmean(values)
    if count == 1:
        return Mean(middle, None)
    return Mean(middle, t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count))


def _aggregate(varied: Mapping[str, str], rows: Sequence[Result]) -> SeedAggregate | None:
    """The aggregate of some jobs; None if no finished job has values."""
    values = [row.values for row in rows if row.state.state == "done" and row.values is not None]
    if not values:
        return None
    return SeedAggregate(varied, len(rows), len(values), tuple(map(mean_with_interval, zip(*values, strict=True))))
