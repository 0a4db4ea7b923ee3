"""What a sweep says: the plan before it begins, the table, and at the end the winner and what to do about failures."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from runner.folder import shown
from runner.sweep.config import SweepConfig
from runner.sweep.estimate import expected
from runner.sweep.need import placed
from runner.sweep.plan import SWEEPS, JobPlan, Plan, Ranking, SweepFolder, short_names
from runner.sweep.results import Result, Results, Score
from runner.sweep.seeds import INTERVAL, SEED, Fold, folds
from runner.tracker.text import counted, duration, number, visible

LONGEST_LIST = 8  # values of an axis that are shown


def planned(folder: SweepFolder, plan: Plan, options: SweepConfig, slots: str, parallel: int) -> list[str]:
    """What is going to happen; `slots` says what each job gets, `parallel` how many run at once."""
    count = options.trials or len(plan.jobs)
    lines = [f"sweep    {count} job{'s' if count > 1 else ''} · {shown(folder.root)}"]
    for position, axis in enumerate(plan.axes):
        lines.append(f"{'' if position else 'varies':9}{axis}  {spans(plan, axis) or _listed(plan, axis)}")
    if plan.search is not None:
        pruned = "; the hopeless are stopped early (sweep.prune)" if options.prune else ""
        lines.append(f"search   {options.search}, {options.sampler or 'tpe'}{pruned}")
    lines.append(f"devices  {slots}")
    lines.append(f"time     {expected(plan, options.trials, parallel)}")
    lines += [f"{'' if i else 'ranked':9}{line}" for i, line in enumerate(ranked(plan.rankings))]
    return lines


def spans(plan: Plan, axis: str) -> str:
    """What a search may try of a key; empty where its values were listed."""
    space = plan.search.space if plan.search else ()
    return "; ".join(dimension.described() for dimension in space if dimension.key == axis)


def _listed(plan: Plan, axis: str) -> str:
    values = list(dict.fromkeys(job.varied[axis] for job in plan.jobs if axis in job.varied))
    return ", ".join(values[:LONGEST_LIST]) + (f", … {len(values)} in all" if len(values) > LONGEST_LIST else "")


def ranked(rankings: Sequence[Ranking]) -> list[str]:
    """By what the jobs are compared, a line per metric."""
    if not rankings:
        return [
            "by the first usual metric that all jobs have (held-out before training); sweep.metric=NAME says another"
        ]
    lines = [f"{'and ' if i else ''}by the {r.take} {better(r)}" for i, r in enumerate(rankings)]
    return [*lines[:-1], f"{lines[-1]} ({rankings[0].why})"]


def better(ranking: Ranking) -> str:
    """A metric, and which way of it is good."""
    return f"{ranking.metric}, {'more' if ranking.mode == 'max' else 'less'} is better"


def rerun(plan: Plan, job: JobPlan) -> str:
    """The command that runs one job again by itself."""
    return shlex.join(["run", *job.words])


def table(results: Results) -> list[str]:
    """One line per job: what it varies, how far it is, its metric, time, device, folder."""
    axes = results.plan.axes
    head = ["job", *short_names(axes).values(), "state", "step", *metrics(results), "time", "device", "folder"]
    return columns([head, *(_row(results, row, axes) for row in results.results)])


def metrics(results: Results) -> list[str]:
    """What ranks the jobs; `metric` where nothing does yet."""
    return [ranking.metric for ranking in results.rankings] or ["metric"]


def scored(row: Result) -> list[str]:
    """A job's values, as many as there are metrics."""
    return ["" if score is None else number(score.value) for score in row.scores] or [""]


def means(results: Results) -> list[list[str]]:
    """A row per setting, the best first: what it sets, its seeds, the means over them; empty where no seed varies."""
    found = folds(results)
    axes = [axis for axis in results.plan.axes if axis != SEED]
    head = [*short_names(axes).values(), "seeds", *metrics(results)]
    rows = [[*(one.varied.get(axis, "") for axis in axes), _seeds(one), *_means(one)] for one in found]
    return [head, *rows] if rows else []


def _seeds(one: Fold) -> str:
    return str(one.seeds) if one.seeds == one.jobs else f"{one.seeds} of {one.jobs}"


def _means(one: Fold) -> list[str]:
    spreads = ["" if m.half_width is None else f" ± {number(m.half_width)}" for m in one.means]
    return [f"{number(m.value)}{spread}" for m, spread in zip(one.means, spreads, strict=True)]


def folded(results: Results) -> list[str]:
    """The means over seeds as a table; empty where no seed varies."""
    rows = means(results)
    return [f"over seeds: {INTERVAL}", *columns(rows)] if rows else []


def ending(results: Results) -> list[str]:
    """The tables, the winner, and for each failure what happened, where its log is, and what runs it again."""
    lines = ["", *table(results)]
    if of_seeds := folded(results):
        lines += ["", *of_seeds]
    lines += ["", *_winners(results), *_failures(results)]
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
        *scored(row),
        duration(row.state.seconds),
        placed(row.job.need, row.state.devices) if row.state.devices else "",
        shown(folder) if folder.exists() else "",
    ]


def winning(results: Results) -> list[str]:
    """The best job, or those that no other beats in all that counts; a line for each, none where there is none."""
    return [
        f"job {row.job.index}  {row.job.label}  {_values(results, row)}{_ties(results, row)}" for row in results.front
    ]


def _ties(results: Results, row: Result) -> str:
    """How many other jobs are exactly as good, where that is so: the first of them is no better than they."""
    others = sum(one.state.state == "done" and one.values == row.values for one in results.results) - 1
    return f" (as {counted(others, 'other job')}; this is the first)" if others else ""


def nobody_wins(results: Results) -> str:
    """Why there is no best job."""
    if not any(row.state.state == "done" for row in results.results):
        return "none: no job is done"
    wanted = " and ".join(metrics(results)) if results.rankings else "usual metric"
    return f"none: no job that is done has a finite {wanted}"


def _values(results: Results, row: Result) -> str:
    pairs = [(r, s) for r, s in zip(results.rankings, row.scores, strict=True) if s is not None]
    return ", ".join(f"{ranking.metric} {number(score.value)} at step {score.step}" for ranking, score in pairs)


def _winners(results: Results) -> Iterator[str]:
    front = results.front
    if not front:
        yield f"best     {nobody_wins(results)}"
        return
    if len(results.rankings) > 1:
        yield (
            f"best     {counted(len(front), 'job')} of {len(results.results)}: no other is as good in all metrics "
            "and better in one (the Pareto front)"
        )
    for row, line in zip(front, winning(results), strict=True):
        yield f"{'best' if results.best else '':9}{line}"
        yield f"again    {rerun(results.plan, row.job)}"
        if model := _model(results, row):
            yield f"model    {model}"
    yield from (f"{'' if i else 'ranked':9}{line}" for i, line in enumerate(ranked(results.rankings)))


def _model(results: Results, row: Result) -> str:
    """Where the weights are that were ranked, or what makes them."""
    folder, [ranking, *_], score = results.folder.run(row.job.index), results.rankings, row.scores[0]
    if ranking.take == "best" and isinstance(score, Score) and score.step != row.steps:
        return f"run export {shown(folder.root)} --checkpoint best"
    return shown(folder.export) if folder.export.is_dir() else ""


def _failures(results: Results) -> Iterator[str]:
    where = name_of(results.folder)
    for row in results.failed:
        yield f"{row.state.state:8} job {row.job.index}  {row.job.label}: {visible(row.state.error or '')}"
        yield f"         log    {shown(results.folder.output(row.job.index))}"
        yield f"         again  run sweep resume {where} --only {row.job.index}"
    if left := [str(row.job.index) for row in results.unfinished]:
        yield f"left     job{'s' if len(left) > 1 else ''} {', '.join(left)}: run sweep resume {where}"
