"""report.html of a sweep: the winner, the curves of all jobs, the table, means over seeds, failures, environment."""

from __future__ import annotations

from runner.errors import EnvironmentProblem
from runner.folder import RunFolder, shown
from runner.manifest import redact
from runner.report.chart import Curve, Point, hues
from runner.report.facts import read_run
from runner.report.page import Page, Row
from runner.sweep import words
from runner.sweep.outcome import last_line
from runner.sweep.plan import short_names
from runner.sweep.results import Results
from runner.sweep.seeds import INTERVAL
from runner.tracker.text import duration


def write_page(results: Results) -> None:
    """Write report.html. Raises StorageError."""
    states = [row.state.state for row in results.results]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    about = f"{len(states)} jobs: {counts} · begun {results.plan.created} · {shown(results.folder.root)}"
    page = Page(f"sweep {results.plan.name}", about)
    _winner(page, results)
    page.head("Curves")
    page.charts(_curves(results), results.rankings[0].metric if results.rankings else None)
    _jobs(page, results)
    _means(page, results)
    _failures(page, results)
    _varies(page, results)
    _environment(page, results)
    page.write(results.folder.report)


def _winner(page: Page, results: Results) -> None:
    front = results.front
    if not front:
        page.card([f"Best: {words.nobody_wins(results)}"])
        return
    if len(results.rankings) > 1:
        counts = f"{len(front)} of {len(results.results)} jobs are on the Pareto front: no other is as good in all and"
        page.card([f"{counts} better in one", *words.ranked(results.rankings)])
        page.scatter(_points(results), *(words.better(ranking) for ranking in results.rankings[:2]))
    for row, line in zip(front, words.winning(results), strict=True):
        about = words.ranked(results.rankings) if results.best else []
        page.card([f"Best: {line}", *about], redact(words.rerun(results.plan, row.job)))


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


def _jobs(page: Page, results: Results) -> None:
    page.head("Jobs")
    axes = results.plan.axes
    rows = []
    for row, hue in zip(results.results, hues(len(results.results)), strict=True):
        varied = [row.job.varied.get(axis, "") for axis in axes]
        steps = f"{row.steps}/{results.plan.data(row.job).get('steps', '?')}"
        cells = [str(row.job.index), *varied, row.state.state, steps, *words.scored(row), duration(row.state.seconds)]
        rows.append(Row([*cells, ",".join(row.state.devices)], str(row.job.index), row.state.state, hue))
    head = ["job", *short_names(axes).values(), "state", "step", *words.metrics(results), "time", "device"]
    page.table(head, rows)


def _means(page: Page, results: Results) -> None:
    if rows := words.means(results):
        page.head("Over seeds")
        page.text(INTERVAL)
        page.table(rows[0], [Row(row) for row in rows[1:]])


def _failures(page: Page, results: Results) -> None:
    if not results.failed:
        return
    page.head("What did not end well")
    where = words.name_of(results.folder)
    for row in results.failed:
        page.text(f"job {row.job.index}  {row.job.label}: {redact(row.state.error or '')}")
        output = results.folder.output(row.job.index)
        page.code(f"{redact(last_line(output))}\n\n{shown(output)}\nrun sweep resume {where} --only {row.job.index}")


def _varies(page: Page, results: Results) -> None:
    page.head("What varies")
    rows = []
    for axis in results.plan.axes:
        values = dict.fromkeys(job.varied[axis] for job in results.plan.jobs if axis in job.varied)
        rows.append(Row([axis, words.spans(results.plan, axis) or ", ".join(values)]))
    page.table(["key", "values"], rows, wrap=True)
    page.code(redact("run -m " + " ".join(results.plan.typed)))


def _environment(page: Page, results: Results) -> None:
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
