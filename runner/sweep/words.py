"""What a sweep says: the plan before it begins, the table, and at the end the winner and what to do about failures."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from runner.folder import shown
from runner.sweep.config import SweepConfig
from runner.sweep.plan import SWEEPS, JobPlan, Plan, Ranking, SweepFolder, short_names
from runner.sweep.results import SEED, Result, Results, folds
from runner.tracker.text import duration, number, visible

LONGEST_LIST = 8  # values of an axis that are shown


def planned(folder: SweepFolder, plan: Plan, options: SweepConfig, slots: str) -> list[str]:
    """What is going to happen."""
    count = options.trials or len(plan.jobs)
    lines = [f"sweep    {count} job{'s' if count > 1 else ''} · {shown(folder.root)}"]
    space = {dimension.key: dimension.described() for dimension in plan.search.space} if plan.search else {}
    for position, axis in enumerate(plan.axes):
        lines.append(f"{'' if position else 'varies':9}{axis}  {space.get(axis) or _listed(plan, axis)}")
    if plan.search is not None:
        pruned = "; the hopeless are stopped early (sweep.prune)" if options.prune else ""
        lines.append(f"search   {options.search}, {options.sampler or 'tpe'}{pruned}")
    lines.append(f"devices  {slots}")
    lines.append(f"ranked   {ranked(plan.ranking)}")
    return lines


def _listed(plan: Plan, axis: str) -> str:
    values = list(dict.fromkeys(job.varied[axis] for job in plan.jobs if axis in job.varied))
    return ", ".join(values[:LONGEST_LIST]) + (f", … {len(values)} in all" if len(values) > LONGEST_LIST else "")


def ranked(ranking: Ranking | None) -> str:
    """By what the jobs are compared."""
    if ranking is None:
        return "by the first usual metric that all jobs have (held-out before training); sweep.metric=NAME says another"
    better = "more" if ranking.mode == "max" else "less"
    return f"by the {ranking.take} {ranking.metric}, {better} is better ({ranking.why})"


def rerun(plan: Plan, job: JobPlan) -> str:
    """The command that runs one job again by itself."""
    return shlex.join(["run", *job.words])


def table(results: Results) -> list[str]:
    """One line per job: what it varies, how far it is, its metric, time, device, folder."""
    axes = results.plan.axes
    metric = results.ranking.metric if results.ranking else "metric"
    head = ["job", *short_names(axes).values(), "state", "step", metric, "time", "device", "folder"]
    return columns([head, *(_row(results, row, axes) for row in results.results)])


def folded(results: Results) -> list[str]:
    """One line per setting: the mean over its seeds and the 95 % interval; empty where no seed varies."""
    found = folds(results)
    if not found or results.ranking is None:
        return []
    axes = [axis for axis in results.plan.axes if axis != SEED]
    head = [*short_names(axes).values(), "seeds", f"{results.ranking.metric}, mean ± 95 % interval"]
    rows = []
    for one in found:
        spread = "" if one.half_width is None else f" ± {number(one.half_width)}"
        rows.append([*(one.varied.get(axis, "") for axis in axes), str(len(one.values)), f"{number(one.mean)}{spread}"])
    return columns([head, *rows])


def ending(results: Results) -> list[str]:
    """The tables, the winner, and for each failure what happened, where its log is, and what runs it again."""
    lines = ["", *table(results)]
    if means := folded(results):
        lines += ["", *means]
    lines += ["", *_winner(results), *_failures(results)]
    return [*lines, f"results  {shown(results.folder.table)}", f"report   {shown(results.folder.report)}"]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text, aligned; nothing is cut."""
    shown_rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in shown_rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown_rows]


def name_of(folder: SweepFolder) -> str:
    """How the sweep is called in a command."""
    return "latest" if (SWEEPS / "latest").resolve() == folder.root.resolve() else shown(folder.root)


def _row(results: Results, row: Result, axes: Sequence[str]) -> list[str]:
    folder = results.folder.run(row.job.index).root
    total = results.plan.data(row.job).get("steps", "?")
    return [
        str(row.job.index),
        *(row.job.varied.get(axis, "") for axis in axes),
        row.state.state,
        f"{row.steps}/{total}",
        "" if row.value is None else number(row.value),
        duration(row.state.seconds),
        f"{row.job.need.kind} {','.join(row.state.devices)}" if row.state.devices else "",
        shown(folder) if folder.exists() else "",
    ]


def _winner(results: Results) -> Iterator[str]:
    best = results.best
    if best is None or results.ranking is None or best.value is None:
        yield (
            "best     none: no job that is done measured the metric"
            if results.ranking
            else "best     none: no job is done"
        )
        return
    folder, ranking = results.folder.run(best.job.index), results.ranking
    value = f"{ranking.metric} {number(best.value)} at step {best.step_of_value}"
    yield f"best     job {best.job.index}  {best.job.label}  {value}"
    yield f"         {ranked(ranking)}"
    yield f"again    {rerun(results.plan, best.job)}"
    if ranking.take == "best" and best.step_of_value != best.steps:
        yield f"model    run export {shown(folder.root)} --checkpoint best"
    elif folder.export.is_dir():
        yield f"model    {shown(folder.export)}"


def _failures(results: Results) -> Iterator[str]:
    where = name_of(results.folder)
    for row in results.failed:
        yield f"{row.state.state:8} job {row.job.index}  {row.job.label}: {visible(row.state.error or '')}"
        yield f"         log    {shown(results.folder.output(row.job.index))}"
        yield f"         again  run sweep resume {where} --only {row.job.index}"
    if left := [str(row.job.index) for row in results.unfinished]:
        yield f"left     job{'s' if len(left) > 1 else ''} {', '.join(left)}: run sweep resume {where}"
