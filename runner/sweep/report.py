"""What a sweep reports: the plan before it begins, its tables, the winner, what to do about failures; report.html."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import RunFolder, shown
from runner.run_dir.manifest import redact
from runner.sweep.config import SweepConfig
from runner.sweep.executor import placed
from runner.sweep.job import FAILED, FINISHED, last_line
from runner.sweep.plan import SWEEPS, JobPlan, Plan, Ranking, SweepFolder, short_names
from runner.sweep.progress import expected
from runner.sweep.results import INTERVAL, SEED, Result, Results, Score, folds
from runner.tools.report.chart import Curve, Point, hues
from runner.tools.report.facts import read_run
from runner.tools.report.page import Page, Row
from runner.tracker.text import columns, counted, duration, number, visible

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


def _values(plan: Plan, axis: str) -> list[str]:
    """What the jobs set a key to, each value once."""
    return list(dict.fromkeys(job.varied[axis] for job in plan.jobs if axis in job.varied))


def _listed(plan: Plan, axis: str) -> str:
    values = _values(plan, axis)
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
    rows = [[*_head(results), "folder"]]
    for row in results.results:
        where = results.folder.run(row.job.index).root
        device = placed(row.job.need, row.state.devices) if row.state.devices else ""
        rows.append([*_cells(results, row), device, shown(where) if where.exists() else ""])
    return columns(rows)


def _head(results: Results) -> list[str]:
    """Of the columns that the table on the screen and that of the page have."""
    names = short_names(results.plan.axes).values()
    return ["job", *names, "state", "step", *metrics(results), "time", "device"]


def _cells(results: Results, row: Result) -> list[str]:
    """A job's, up to its time."""
    varied = [row.job.varied.get(axis, "") for axis in results.plan.axes]
    steps = f"{row.steps}/{results.plan.data(row.job).get('steps', '?')}"
    scores = ["" if score is None else number(score.value) for score in row.scores] or [""]
    return [str(row.job.index), *varied, row.state.state, steps, *scores, duration(row.state.seconds)]


def metrics(results: Results) -> list[str]:
    """What ranks the jobs; `metric` where nothing does yet."""
    return [ranking.metric for ranking in results.rankings] or ["metric"]


def seed_means(results: Results) -> list[list[str]]:
    """A row per setting, the best first: what it sets, its seeds, the means over them; empty where no seed varies."""
    axes = [axis for axis in results.plan.axes if axis != SEED]
    rows = [[*short_names(axes).values(), "seeds", *metrics(results)]]
    for one in folds(results):
        seeds = str(one.seeds) if one.seeds == one.jobs else f"{one.seeds} of {one.jobs}"
        spreads = ["" if mean.half_width is None else f" ± {number(mean.half_width)}" for mean in one.means]
        means = [f"{number(mean.value)}{spread}" for mean, spread in zip(one.means, spreads, strict=True)]
        rows.append([*(one.varied.get(axis, "") for axis in axes), seeds, *means])
    return rows if len(rows) > 1 else []


def folded(results: Results) -> list[str]:
    """The means over seeds as a table; empty where no seed varies."""
    rows = seed_means(results)
    return [f"over seeds: {INTERVAL}", *columns(rows)] if rows else []


def ending(results: Results) -> list[str]:
    """The tables, the winner, and for each failure what happened, where its log is, and what runs it again."""
    lines = ["", *table(results)]
    if of_seeds := folded(results):
        lines += ["", *of_seeds]
    lines += ["", *_winners(results), *_failures(results)]
    return [*lines, f"results  {shown(results.folder.table)}", f"report   {shown(results.folder.report)}"]


def name_of(folder: SweepFolder) -> str:
    """How the sweep is called in a command."""
    return "latest" if (SWEEPS / "latest").resolve() == folder.root.resolve() else shown(folder.root)


def winning(results: Results) -> Iterator[str]:
    """The best job, or those that no other beats in all that counts; a line for each, none where there is none.

    Jobs that are exactly as good are counted: the first of them is no better than they.
    """
    for row in results.front:
        scores = [(r.metric, s) for r, s in zip(results.rankings, row.scores, strict=True) if s is not None]
        values = ", ".join(f"{metric} {number(score.value)} at step {score.step}" for metric, score in scores)
        others = sum(one.state.state == "done" and one.values == row.values for one in results.results) - 1
        ties = f" (as {counted(others, 'other job')}; this is the first)" if others else ""
        yield f"job {row.job.index}  {row.job.label}  {values}{ties}"


def nobody_wins(results: Results) -> str:
    """Why there is no best job."""
    if not any(row.state.state == "done" for row in results.results):
        return "none: no job is done"
    wanted = " and ".join(metrics(results)) if results.rankings else "usual metric"
    return f"none: no job that is done has a finite {wanted}"


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
    if left := [str(row.job.index) for row in results.results if row.state.state not in FINISHED | FAILED]:
        yield f"left     job{'s' if len(left) > 1 else ''} {', '.join(left)}: run sweep resume {where}"


def write_page(results: Results) -> None:
    """Write report.html. Raises StorageError."""
    states = [row.state.state for row in results.results]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    about = f"{len(states)} jobs: {counts} · begun {results.plan.created} · {shown(results.folder.root)}"
    page = Page(f"sweep {results.plan.name}", about)
    _winner_section(page, results)
    page.head("Curves")
    page.charts(_curves(results), results.rankings[0].metric if results.rankings else None)
    _jobs_section(page, results)
    _means_section(page, results)
    _failures_section(page, results)
    _varies_section(page, results)
    _environment_section(page, results)
    page.write(results.folder.report)


def _winner_section(page: Page, results: Results) -> None:
    front = results.front
    if not front:
        page.card([f"Best: {nobody_wins(results)}"])
        return
    if len(results.rankings) > 1:
        counts = f"{len(front)} of {len(results.results)} jobs are on the Pareto front: no other is as good in all and"
        page.card([f"{counts} better in one", *ranked(results.rankings)])
        page.scatter(_points(results), *(better(ranking) for ranking in results.rankings[:2]))
    for row, line in zip(front, winning(results), strict=True):
        about = ranked(results.rankings) if results.best else []
        page.card([f"Best: {line}", *about], redact(rerun(results.plan, row.job)))


def _points(results: Results) -> list[Point]:
    """Each job that measured the first two metrics, those on the front marked."""
    front = {row.job.index for row in results.front}
    found = []
    for row, hue in zip(results.results, hues(len(results.results)), strict=True):
        first, second = row.scores[:2]
        if row.values is not None and first is not None and second is not None:
            name, index = f"job {row.job.index}  {row.job.label}", row.job.index
            found.append(Point(name, str(index), hue, first.value, second.value, index in front))
    return found


def _curves(results: Results) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    colours = hues(len(results.results))
    for row, hue in zip(results.results, colours, strict=True):
        for metric, series in row.series.items():
            curve = Curve(f"job {row.job.index}  {row.job.label}", str(row.job.index), hue, series)
            found.setdefault(metric, []).append(curve)
    return found


def _jobs_section(page: Page, results: Results) -> None:
    page.head("Jobs")
    rows = []
    for row, hue in zip(results.results, hues(len(results.results)), strict=True):
        cells = [*_cells(results, row), ",".join(row.state.devices)]
        rows.append(Row(cells, str(row.job.index), row.state.state, hue))
    page.table(_head(results), rows)


def _means_section(page: Page, results: Results) -> None:
    if rows := seed_means(results):
        page.head("Over seeds")
        page.text(INTERVAL)
        page.table(rows[0], [Row(row) for row in rows[1:]])


def _failures_section(page: Page, results: Results) -> None:
    if not results.failed:
        return
    page.head("What did not end well")
    where = name_of(results.folder)
    for row in results.failed:
        page.text(f"job {row.job.index}  {row.job.label}: {redact(row.state.error or '')}")
        output = results.folder.output(row.job.index)
        page.code(f"{redact(last_line(output))}\n\n{shown(output)}\nrun sweep resume {where} --only {row.job.index}")


def _varies_section(page: Page, results: Results) -> None:
    page.head("What varies")
    plan = results.plan
    rows = [Row([axis, spans(plan, axis) or ", ".join(_values(plan, axis))]) for axis in plan.axes]
    page.table(["key", "values"], rows, wrap=True)
    page.code(redact("run -m " + " ".join(plan.typed)))


def _environment_section(page: Page, results: Results) -> None:
    """What the jobs were made of: said once where they agree, and by whom where they do not."""
    page.head("Environment")
    found: dict[tuple[str, str], list[int]] = {}
    seen = 0
    for row in results.results:
        run = results.folder.run(row.job.index)
        if not run.spec.is_file():
            continue
        seen += 1
        for name, value in _of_job(run).items():
            found.setdefault((name, value), []).append(row.job.index)
    if not seen:
        page.text("no job has begun")
        return
    rows = []
    for (name, value), jobs in found.items():
        whose = "" if len(jobs) == seen else f"  (job {', '.join(map(str, jobs))})"
        rows.append(Row([name, value + whose]))
    page.table(["", "what"], rows, wrap=True)


def _of_job(run: RunFolder) -> dict[str, str]:
    """Without what is a job's own by design: its devices. One damaged file costs no other job its results."""
    try:
        environment = read_run(run).environment
    except EnvironmentProblem as error:
        return {"not known": str(error)}
    return {name: value for name, value in environment.items() if not name.endswith("VISIBLE_DEVICES")}
