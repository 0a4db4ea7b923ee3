"""What a sweep found: one result per job, read from the jobs' own files; the best of them; seeds folded together.

One ranking: the best job. Several: the jobs of which none is beaten in all that counts (the Pareto front).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.checkpoint.config import direction
from runner.folder import shown, write_atomic, write_json
from runner.report.facts import PREFERRED, Series, read
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder
from runner.sweep.record import FAILED, FINISHED, JobState, Record

FOUND = "the first of the usual ones that all jobs have; sweep.metric names another"


@dataclass(frozen=True, slots=True)
class Score:
    """What ranks a job by one metric: the value, NaN if it is not finite, and the step that measured it."""

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Result:
    """One job and what came of it; a score per ranking, None where it never had a finite value of the metric."""

    job: JobPlan
    state: JobState
    steps: int
    scores: tuple[Score | None, ...]
    series: Mapping[str, Series]

    @property
    def values(self) -> tuple[float, ...] | None:
        """Its value by each ranking; None where one of them is missing or not finite, or there is no ranking."""
        found = tuple(score.value for score in self.scores if score is not None and math.isfinite(score.value))
        return found if found and len(found) == len(self.scores) else None


@dataclass(frozen=True, slots=True)
class Results:
    """All of a sweep."""

    plan: Plan
    folder: SweepFolder
    rankings: tuple[Ranking, ...]
    results: tuple[Result, ...]

    @property
    def best(self) -> Result | None:
        """The winner, the first of equals; None with several rankings, or where no job that is done has a value."""
        front = self.front
        return front[0] if len(self.rankings) == 1 and front else None

    @property
    def front(self) -> list[Result]:
        """The jobs that are done and beaten by none: no other is as good by each ranking and better by one. In the
        order of the first ranking; of equals the first."""
        ranked = [(self._losses(r), r) for r in self.results if r.state.state == "done" and r.values is not None]
        kept: list[tuple[tuple[float, ...], Result]] = []
        for losses, result in sorted(ranked, key=lambda pair: pair[0]):  # stable; what beats one comes before it
            if not any(_is_as_good(other, losses) for other, _ in kept):
                kept.append((losses, result))
        return [result for _, result in kept]

    def _losses(self, result: Result) -> tuple[float, ...]:
        """Its values with the sign that makes less better."""
        pairs = zip(self.rankings, result.values or (), strict=True)
        return tuple(-value if ranking.mode == "max" else value for ranking, value in pairs)

    @property
    def failed(self) -> list[Result]:
        """Jobs that ran and failed, were killed, or took too long."""
        return [r for r in self.results if r.state.state in FAILED]

    @property
    def unfinished(self) -> list[Result]:
        """Jobs that a resume goes on with by itself."""
        return [r for r in self.results if r.state.state not in FINISHED | FAILED]


def _is_as_good(other: tuple[float, ...], one: tuple[float, ...]) -> bool:
    """Whether `other` is nowhere worse than `one`."""
    return all(a <= b for a, b in zip(other, one, strict=True))


def gather(folder: SweepFolder, plan: Plan, record: Record) -> Results:
    """Read what every job has left so far."""
    series = [read(folder.run(job.index).metrics) for job in plan.jobs]
    rankings = plan.rankings or _common(series, [state.state == "done" for state in record])
    rows = [_result(job, record[job.index], series[job.index], rankings) for job in plan.jobs]
    return Results(plan, folder, rankings, tuple(rows))


def values_of(folder: SweepFolder, plan: Plan, index: int) -> tuple[float, ...] | None:
    """What ranks one job, as far as it has come, by each ranking; None where one of the numbers is not there."""
    return _result(plan.jobs[index], JobState(), read(folder.run(index).metrics), plan.rankings).values


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
        "front": [row.job.index for row in results.front],
    }
    write_json(results.folder.results, head | {"jobs": [_entry(results, row) for row in results.results]})


def _write_table(results: Results) -> None:
    axes, metrics = results.plan.axes, [ranking.metric for ranking in results.rankings]
    before, after = ["state", "attempts", "exit_code", "steps"], ["best", "seconds", "folder", "error"]
    scores = [name for metric in metrics for name in (metric, f"{metric} step")]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["job", *axes, *before, *scores, *after])
    front = {row.job.index for row in results.front}
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
        "folder": shown(results.folder.run(row.job.index).root),
        "error": row.state.error,
        "last": {name: _finite(series.last[1]) for name, series in row.series.items()},
    }


def _finite(value: float) -> float | None:
    """The value as JSON can hold it, as in metrics.jsonl: null where it is not finite."""
    return value if math.isfinite(value) else None


def _common(series: Sequence[Mapping[str, Series]], done: Sequence[bool]) -> tuple[Ranking, ...]:
    """The first of the preferred metrics that all finished jobs have."""
    finished = [of_job for of_job, is_done in zip(series, done, strict=True) if is_done]
    for metric in PREFERRED:
        mode = direction(metric)
        if mode is not None and finished and all(metric in of_job for of_job in finished):
            return (Ranking(metric, mode, "last", FOUND),)
    return ()


def _result(job: JobPlan, state: JobState, series: Mapping[str, Series], rankings: Sequence[Ranking]) -> Result:
    steps = max((s.last[0] for s in series.values()), default=0)
    return Result(job, state, steps, tuple(_score(series.get(r.metric), r) for r in rankings), series)


def _score(series: Series | None, ranking: Ranking) -> Score | None:
    if series is None:
        return None
    step, value = series.best(ranking.mode) if ranking.take == "best" else series.last
    return Score(value, step)
