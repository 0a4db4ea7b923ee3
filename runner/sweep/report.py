"""Reports of a sweep: the plan, tables, the best job, commands for failed jobs, and report.html."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import RunFolder, display_path, run_argument
from runner.run_dir.manifest import redact
from runner.spec.evaluation import without_bounds
from runner.sweep.config import SweepConfig
from runner.sweep.executor import placement_text
from runner.sweep.job import FAILED, FINISHED, last_line
from runner.sweep.plan import SWEEPS, Plan, Ranking, SweepFolder, short_names
from runner.sweep.progress import estimated_time, planned_steps
from runner.sweep.results import INTERVAL, SEED, Result, Results, Score, aggregate_seeds
from runner.tools.report.chart import Curve, Point, hues
from runner.tools.report.page import Page, TableRow
from runner.tools.report.run_facts import Series, read_run
from runner.tracker.text import align_columns, count_noun, escape_for_terminal, format_duration, format_number

LONGEST_LIST = 8  # values of an axis that are shown
MOST_IN_LEGEND = 24  # jobs; more are named by the table, and on hover


def plan_lines(folder: SweepFolder, plan: Plan, options: SweepConfig, slots: str, parallel: int) -> list[str]:
    """The plan as text. slots: the resources of each job; parallel: number of concurrent jobs."""
    count = options.trials or len(plan.jobs)
    lines = [f"sweep    {count} job{'s' if count > 1 else ''} · {display_path(folder.root)}"]
    for position, axis in enumerate(plan.axes):
        values = _values(plan, axis)
        more = f", … {len(values)} in total" if len(values) > LONGEST_LIST else ""
        listed = search_range(plan, axis) or ", ".join(values[:LONGEST_LIST]) + more
        lines.append(f"{'' if position else 'varies':9}{axis}  {listed}")
    if plan.search is not None:
        pruned = "; bad jobs are stopped early (sweep.prune)" if options.prune else ""
        lines.append(f"search   {options.search}, {options.sampler or 'tpe'}{pruned}")
    lines.append(f"devices  {slots}")
    lines.append(f"time     {estimated_time(plan, options.trials, parallel)}")
    lines += [f"{'' if i else 'ranked':9}{line}" for i, line in enumerate(ranking_lines(plan.rankings))]
    return lines


def search_range(plan: Plan, axis: str) -> str:
    """The range of a key in a search; empty if its values are listed."""
    space = plan.search.space if plan.search else ()
    return "; ".join(dimension.range_text() for dimension in space if dimension.key == axis)


def _values(plan: Plan, axis: str) -> list[str]:
    """The distinct values of a key in the jobs."""
    return list(dict.fromkeys(job.varied[axis] for job in plan.jobs if axis in job.varied))


def ranking_lines(rankings: Sequence[Ranking]) -> list[str]:
    """How the jobs are ranked, a line per metric."""
    if not rankings:
        text = "by the first usual metric that all jobs have (held-out before training)"
        return [f"{text}; to change it: sweep.metric=NAME"]
    lines = [f"{'and ' if i else ''}by the {r.take} {better_text(r)}" for i, r in enumerate(rankings)]
    return [*lines[:-1], f"{lines[-1]} ({rankings[0].why})"]


def better_text(ranking: Ranking) -> str:
    """A metric and its direction."""
    return f"{ranking.metric}, {'higher' if ranking.mode == 'max' else 'lower'} is better"


def job_table(results: Results) -> list[str]:
    """One line per job: varied values, state, steps, metrics, time, device, folder."""
    rows = [[*_table_head(results), "folder"]]
    for row in results.results:
        where = results.folder.run(row.job.index).root
        device = placement_text(row.job.need, row.state.devices) if row.state.devices else ""
        rows.append([*_cells(results, row), device, display_path(where) if where.exists() else ""])
    return align_columns(rows)


def _table_head(results: Results) -> list[str]:
    """The column names that the screen's and the page's table share."""
    names = short_names(results.plan.axes).values()
    return ["job", *names, "state", "step", *metrics(results), "time", "device"]


def _cells(results: Results, row: Result) -> list[str]:
    """The cells of a job, up to its time."""
    varied = [row.job.varied.get(axis, "") for axis in results.plan.axes]
    steps = f"{row.steps}/{planned_steps(results.plan.data(row.job))}"
    scores = ["" if score is None else format_number(score.value) for score in row.scores] or [""]
    return [str(row.job.index), *varied, row.state.state, steps, *scores, format_duration(row.state.seconds)]


def metrics(results: Results) -> list[str]:
    """The metrics that rank the jobs; `metric` if there is none yet."""
    return [ranking.metric for ranking in results.rankings] or ["metric"]


def seed_means(results: Results) -> list[list[str]]:
    """One row per setting, best first: setting, seeds, means; empty if no seed varies."""
    axes = [axis for axis in results.plan.axes if axis != SEED]
    rows = [[*short_names(axes).values(), "seeds", *metrics(results)]]
    for one in aggregate_seeds(results) if SEED in results.plan.axes else ():
        seeds = str(one.seeds) if one.seeds == one.jobs else f"{one.seeds} of {one.jobs}"
        spreads = ["" if mean.half_width is None else f" ± {format_number(mean.half_width)}" for mean in one.means]
        means = [f"{format_number(mean.value)}{spread}" for mean, spread in zip(one.means, spreads, strict=True)]
        rows.append([*(one.varied.get(axis, "") for axis in axes), seeds, *means])
    return rows if len(rows) > 1 else []


def ending_lines(results: Results) -> list[str]:
    """The tables, the best job, and for each failed job its error, its log and how to run it again."""
    lines = ["", *job_table(results)]
    if rows := seed_means(results):
        lines += ["", f"over seeds: {INTERVAL}", *align_columns(rows)]
    lines += ["", *_winners(results), *_failures(results)]
    return [*lines, f"results  {display_path(results.folder.table)}", f"report   {display_path(results.folder.report)}"]


def winner_lines(results: Results) -> Iterator[str]:
    """One line for the best job, or for each job of the Pareto front, with the number of equal jobs."""
    for row in results.pareto_front:
        scores = [(r.metric, s) for r, s in zip(results.rankings, row.scores, strict=True) if s is not None]
        values = ", ".join(f"{metric} {format_number(score.value)} at step {score.step}" for metric, score in scores)
        others = sum(one.state.state == "done" and one.values == row.values for one in results.results) - 1
        ties = f" (equal to {count_noun(others, 'other job')}; this is the first)" if others else ""
        yield f"job {row.job.index}  {row.job.label}  {values}{ties}"


def no_winner_reason(results: Results) -> str:
    """Why there is no best job; empty where there is one, or a Pareto front."""
    if results.equal_jobs:
        values = zip(metrics(results), results.pareto_front[0].values or (), strict=True)
        shown = ", ".join(f"{metric} {format_number(value)}" for metric, value in values)
        return f"no difference: all {results.equal_jobs} finished jobs have {shown}"
    if results.pareto_front:
        return ""
    if not any(row.state.state == "done" for row in results.results):
        return "none: no job has finished"
    wanted = " and ".join(metrics(results)) if results.rankings else "usual metric"
    return f"none: no finished job has a finite {wanted}"


def _winners(results: Results) -> Iterator[str]:
    front = results.pareto_front
    if reason := no_winner_reason(results):
        yield f"best     {reason}"
        return
    if len(results.rankings) > 1:
        count = f"{count_noun(len(front), 'job')} of {len(results.results)}"
        yield f"best     {count}: no other is as good in all metrics and better in one (the Pareto front)"
    for row, line in zip(front, winner_lines(results), strict=True):
        yield f"{'best' if results.best else '':9}{line}"
        yield f"again    {shlex.join(['run', *row.job.words])}"
        if model := _model(results, row):
            yield f"model    {model}"
    yield from (f"{'' if i else 'ranked':9}{line}" for i, line in enumerate(ranking_lines(results.rankings)))


def _model(results: Results, row: Result) -> str:
    """The folder of the ranked weights, or the command that exports them."""
    folder, [ranking, *_], score = results.folder.run(row.job.index), results.rankings, row.scores[0]
    if ranking.take == "best" and isinstance(score, Score) and score.step != row.steps:
        return f"run export {display_path(folder.root)} --checkpoint best"
    return display_path(folder.export) if folder.export.is_dir() else ""


def _failures(results: Results) -> Iterator[str]:
    where = run_argument(RunFolder(results.folder.root), SWEEPS)
    for row in results.failed_jobs:
        yield f"{row.state.state:8} job {row.job.index}  {row.job.label}: {escape_for_terminal(row.state.error or '')}"
        yield f"         log    {display_path(results.folder.output(row.job.index))}"
        yield f"         again  run sweep resume {where} --only {row.job.index}"
    if left := [str(row.job.index) for row in results.results if row.state.state not in FINISHED | FAILED]:
        yield f"left     job{'s' if len(left) > 1 else ''} {', '.join(left)}: run sweep resume {where}"


def write_page(results: Results) -> None:
    """Write report.html. Raises StorageError."""
    states = [row.state.state for row in results.results]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    about = f"{len(states)} jobs: {counts} · started {results.plan.created} · {display_path(results.folder.root)}"
    page = Page(f"sweep {results.plan.name}", about)
    _winner_section(page, results)
    _axes_section(page, results)
    page.head("Curves")
    if len(results.results) <= MOST_IN_LEGEND:
        page.legend([_curve(row, hue, Series(())) for row, hue in _with_hues(results)])
    page.charts(_curves(results), results.rankings[0].metric if results.rankings else None)
    _jobs_section(page, results)
    _means_section(page, results)
    _failures_section(page, results)
    _varies_section(page, results)
    _environment_section(page, results)
    page.write(results.folder.report)


def _winner_section(page: Page, results: Results) -> None:
    front = results.pareto_front
    if reason := no_winner_reason(results):
        page.card([f"Best: {reason}"])
        return
    if len(results.rankings) > 1:
        counts = f"{len(front)} of {len(results.results)} jobs are on the Pareto front: no other is as good in all and"
        page.card([f"{counts} better in one", *ranking_lines(results.rankings)])
        page.scatter(_points(results), *(better_text(ranking) for ranking in results.rankings[:2]))
    for row, line in zip(front, winner_lines(results), strict=True):
        about = ranking_lines(results.rankings) if results.best else []
        page.card([f"Best: {line}", *about], redact(shlex.join(["run", *row.job.words])))


def _axes_section(page: Page, results: Results) -> None:
    """Chart the first metric against each varied number, with its interval over seeds."""
    found = aggregate_seeds(results)
    for axis in (axis for axis in results.plan.axes if axis != SEED):
        places = [(x, one) for one in found if (x := _number(one.varied.get(axis))) is not None]
        if len({x for x, _ in places}) < 2:
            if len({one.varied.get(axis) for one in found}) > 1:
                page.text(f"{axis}: no chart, because its values are not numbers; see the table of jobs")
            continue
        others = [" ".join(f"{k}={v}" for k, v in one.varied.items() if k != axis) for _, one in places]
        colors = dict(zip(dict.fromkeys(others), hues(len(set(others))), strict=True))
        metric = metrics(results)[0]
        page.head(f"{metric} against {axis}")
        if len(colors) > 1:
            page.legend([Curve(name, "", hue, Series(())) for name, hue in colors.items()])
        points = [
            Point(f"{axis}={x:g} {name}", "", colors[name], x, one.means[0].value, True, one.means[0].half_width or 0.0)
            for (x, one), name in zip(places, others, strict=True)
        ]
        page.scatter(points, axis, f"{metric}, {INTERVAL}" if SEED in results.plan.axes else metric)


def _number(text: str | None) -> float | None:
    """The value of an axis if it is a finite number, else None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _points(results: Results) -> list[Point]:
    """A point for each job that measured the first two metrics; those of the Pareto front are marked."""
    front = {row.job.index for row in results.pareto_front}
    found = []
    for row, hue in _with_hues(results):
        first, second = row.scores[:2]
        if row.values is not None and first is not None and second is not None:
            name, index = f"job {row.job.index}  {row.job.label}", row.job.index
            found.append(Point(name, str(index), hue, first.value, second.value, index in front))
    return found


def _curves(results: Results) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    for row, hue in _with_hues(results):
        for metric in without_bounds(row.series):
            found.setdefault(metric, []).append(_curve(row, hue, row.series[metric]))
    return found


def _with_hues(results: Results) -> Iterator[tuple[Result, int]]:
    return zip(results.results, hues(len(results.results)), strict=True)


def _curve(row: Result, hue: int, series: Series) -> Curve:
    return Curve(f"job {row.job.index}  {row.job.label}", str(row.job.index), hue, series)


def _jobs_section(page: Page, results: Results) -> None:
    page.head("Jobs")
    rows = []
    for row, hue in _with_hues(results):
        cells = [*_cells(results, row), ",".join(row.state.devices)]
        rows.append(TableRow(cells, str(row.job.index), row.state.state, hue))
    page.table(_table_head(results), rows)


def _means_section(page: Page, results: Results) -> None:
    if rows := seed_means(results):
        page.head("Over seeds")
        page.text(INTERVAL)
        page.table(rows[0], [TableRow(row) for row in rows[1:]])


def _failures_section(page: Page, results: Results) -> None:
    if not results.failed_jobs:
        return
    page.head("Jobs that failed")
    where = run_argument(RunFolder(results.folder.root), SWEEPS)
    for row in results.failed_jobs:
        page.text(f"job {row.job.index}  {row.job.label}: {redact(row.state.error or '')}")
        output = results.folder.output(row.job.index)
        again = f"run sweep resume {where} --only {row.job.index}"
        page.code(f"{redact(last_line(output))}\n\n{display_path(output)}\n{again}")


def _varies_section(page: Page, results: Results) -> None:
    page.head("What varies")
    plan = results.plan
    rows = [TableRow([axis, search_range(plan, axis) or ", ".join(_values(plan, axis))]) for axis in plan.axes]
    page.table(["key", "values"], rows, wrap=True)
    page.code(redact("run -m " + " ".join(plan.typed)))


def _environment_section(page: Page, results: Results) -> None:
    """List the environment of the jobs; values that differ name their jobs."""
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
        page.text("no job has started")
        return
    rows = []
    for (name, value), jobs in found.items():
        whose = "" if len(jobs) == seen else f"  (job {', '.join(map(str, jobs))})"
        rows.append(TableRow([name, value + whose]))
    page.table(["", "what"], rows, wrap=True)


def _of_job(run: RunFolder) -> dict[str, str]:
    """A run's environment without its devices; if it cannot be read, the error."""
    try:
        environment = read_run(run).environment
    except EnvironmentProblem as error:
        return {"not known": str(error)}
    return {name: value for name, value in environment.items() if not name.endswith("VISIBLE_DEVICES")}
