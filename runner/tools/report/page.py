"""One run's HTML report: numbers, curves, samples, automatic choices, settings, environment.

The page needs nothing but itself: style, script and charts are in it, and it may fetch nothing. Everything that a user,
a model or a log wrote is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from string import Template
from typing import Any

import yaml

from runner.run_dir.folder import RunFolder, display_path, write_atomic
from runner.run_dir.manifest import redact
from runner.spec.base import iter_leaves
from runner.spec.evaluation import without_bounds
from runner.tools.report.chart import MOST_POINTS, Curve, Point, histogram_svg, hues, interval_curves, scatter_svg, svg
from runner.tools.report.run_facts import PREFERRED, RunFacts, Series, read_rows, read_run
from runner.tracker.console import interval_text
from runner.tracker.text import HEALTH, count_noun, escape_html, format_duration, format_metric, format_number

HERE = Path(__file__).parent
MOST_CHARTS = 60  # these bounds keep a page below 500 kB
POINTS = 5000  # of all curves of a page
FEWEST_POINTS = 16  # of a curve
MOST_CHARACTERS = 1000  # of a cell or line
MOST_PRINTED = 20_000  # characters of a command or an error
RANKED = [*PREFERRED, *HEALTH]
MACHINE_PREFIXES = ("perf/", "time/", "weight_sync/", "device/")  # behind the others
SWITCHES = (
    '<p><label><input type="checkbox" id="smooth" checked> smoothed</label> '
    '<label><input type="checkbox" id="log"> logarithmic axis, where all values are positive</label></p>'
)


@dataclass(frozen=True, slots=True)
class TableRow:
    """A table row; `key` ties it to a curve, `kind` names its look, `hue` gives it a dot in that color."""

    cells: Sequence[str]
    key: str = ""
    kind: str = ""
    hue: int | None = None


@dataclass(slots=True)
class Page:
    """A page under construction: parts are added in their order."""

    title: str
    about: str = ""
    parts: list[str] = field(default_factory=list)

    def head(self, text: str) -> None:
        """A heading."""
        self.parts.append(f"<h2>{_escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A line."""
        self.parts.append(f"<p>{_escape(text)}</p>")

    def code(self, text: str) -> None:
        """A command, or what a program printed."""
        self.parts.append(f"<pre>{escape_html(text, MOST_PRINTED)}</pre>")

    def card(self, lines: Sequence[str], command: str = "") -> None:
        """What a reader should see first."""
        inner = "".join(f"<p>{_escape(line)}</p>" for line in lines)
        inner += f"<pre>{_escape(command)}</pre>" if command else ""
        self.parts.append(f'<div class="card">{inner}</div>')

    def table(self, head: Sequence[str], rows: Sequence[TableRow], wrap: bool = False) -> None:
        """A table; `wrap` lets the last column break its lines."""
        names = "".join(f"<th>{_escape(name)}</th>" for name in head)
        body = "".join(_row(row, wrap) for row in rows)
        table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
        self.parts.append(f'<div class="scroll">{table}</div>')

    def charts(self, curves: Mapping[str, Sequence[Curve]], first: str | None = None) -> None:
        """A small chart per metric in a section per prefix, with switches for smoothing and a log axis.

        The POINTS of a page are shared by its curves; metrics for which none are left are named.
        """
        names = order_metrics(list(curves), first)
        if not names:
            self.text("no metric was measured yet")
            return
        counts = list(accumulate(len(curves[name]) for name in names[:MOST_CHARTS]))
        shown = names[: max(sum(count <= POINTS // FEWEST_POINTS for count in counts), 1)]
        most = min(max(POINTS // counts[len(shown) - 1], FEWEST_POINTS), MOST_POINTS)
        self.parts.append(SWITCHES)
        sections: dict[str, list[str]] = {}
        for name in shown:
            found, series = curves[name], curves[name][0].series
            last = f" {format_metric(name, series.last[1])}" if len(found) == 1 and series.points else ""
            chart = svg(found, f"{name} over the step, {count_noun(len(found), 'curve')}", most)
            figure = f'<figure data-metric="{_escape(name)}">{_caption(name + last)}{chart}</figure>'
            sections.setdefault("health" if name in HEALTH else name.split("/")[0], []).append(figure)
        for prefix, figures in sections.items():
            self.parts.append(f'<h3>{_escape(prefix)}</h3><div class="multiples">{"".join(figures)}</div>')
        if len(names) > len(shown):
            self.text(f"{len(names) - len(shown)} more metrics are in metrics.jsonl: {', '.join(names[len(shown) :])}")

    def legend(self, curves: Sequence[Curve]) -> None:
        """The names of the curves beside their colors."""
        dots = "".join(f'<span class="key">{_dot(curve.hue)}{_escape(curve.name)}</span> ' for curve in curves)
        self.parts.append(f"<p>{dots}</p>")

    def histogram(self, groups: Sequence[tuple[Curve, Sequence[float]]], label: str) -> None:
        """How often each value occurs in each group, with a legend."""
        self.legend([curve for curve, _ in groups])
        self.parts.append(f'<div class="multiples"><figure>{histogram_svg(groups, label)}</figure></div>')

    def scatter(self, points: Sequence[Point], x: str, y: str) -> None:
        """Two numbers of each job against each other."""
        self.parts.append(f'<div class="multiples"><figure>{_caption(y)}{scatter_svg(points, x, y)}</figure></div>')

    def render(self) -> str:
        """The page."""
        script = _asset("page.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        texts = {"title": _escape(self.title), "about": _escape(self.about), "parts": "\n".join(self.parts)}
        return Template(_asset("page.html")).substitute(texts, style=_asset("page.css"), script=script, digest=digest)

    def write(self, path: Path) -> None:
        """Write the page. Raises StorageError."""
        write_atomic(path, self.render().encode("utf-8", "backslashreplace").decode("utf-8"))


def order_metrics(names: Sequence[str], first: str | None) -> list[str]:
    """Metrics in the order in which they are worth a look."""

    def rank(name: str) -> tuple[bool, int, bool, str]:
        place = RANKED.index(name) if name in RANKED else len(RANKED)
        return (name != first, place, name.startswith(MACHINE_PREFIXES), name)

    return sorted(names, key=rank)


def _escape(text: str) -> str:
    return escape_html(text, MOST_CHARACTERS)


def _caption(text: str) -> str:
    return f'<figcaption class="faint">{_escape(text)}</figcaption>'


def _dot(hue: int) -> str:
    return f'<span class="dot" style="--hue:{hue}"></span>'


def _row(row: TableRow, wrap: bool) -> str:
    dot = "" if row.hue is None else _dot(row.hue)
    cells = []
    for position, cell in enumerate(row.cells):
        kind = ' class="wrap"' if wrap and position == len(row.cells) - 1 else ""
        cells.append(f"<td{kind}>{dot if position == 0 else ''}{_escape(cell)}</td>")
    key = f' data-key="{_escape(row.key)}"' if row.key else ""
    kind = f' class="{_escape(row.kind)}"' if row.kind else ""
    return f"<tr{key}{kind}>{''.join(cells)}</tr>"


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


HUE = 210
MOST_SAMPLES = 8
MOST_EVALUATIONS = 4
FILES = ("job", "spec.yaml")  # the origin of a default


def write_page(folder: RunFolder, path: Path) -> None:
    """Write a run's report. Raises StorageError, EnvironmentProblem."""
    run = read_run(folder)
    state = str(run.status.get("state", "unknown"))
    steps = max((series.last[0] for series in run.series.values()), default=0)
    page = Page(
        str(run.spec.get("name", "run")),
        f"{state} · step {steps}/{run.spec.get('steps')} · {display_path(folder.root)}",
    )
    page.card(_headlines(run), redact(f"run --spec {display_path(folder.spec)}"))
    if run.status.get("error"):
        page.head("Error")
        page.code(redact(str(run.status["error"])))
    page.head("Curves")
    curves = interval_curves("", "", HUE, run.series)
    page.charts({name: [curve] for name, curve in curves.items()}, _first(run))
    samples = list(read_rows(folder.samples))
    _reward_histogram(page, samples)
    if samples:
        from runner.tools.report.samples_grid import evaluated_samples, samples_grid

        page.parts += samples_grid(evaluated_samples(samples))
    _evaluations(page, run)
    _times(page, run)
    _samples(page, samples[-MOST_SAMPLES:])
    _decisions(page, run)
    _settings(page, run)
    page.head("Environment")
    page.table(["", "what"], [TableRow([name, value]) for name, value in run.environment.items()], wrap=True)
    page.write(path)


def _reward_histogram(page: Page, samples: Sequence[Mapping[str, Any]]) -> None:
    """Rewards of the rollouts in samples.jsonl, the first half of the steps beside the second."""
    rewards = [(int(row["step"]), row["reward"]) for row in samples if "version" in row and _has_reward(row)]
    if len(rewards) < 2:
        return
    middle = (rewards[0][0] + rewards[-1][0]) / 2
    halves = [[float(r) for step, r in rewards if (step > middle) == is_second] for is_second in (False, True)]
    names = (f"steps up to {middle:g}", f"steps after {middle:g}")
    groups = [(Curve(f"{n}: {len(g)}", "", h, Series(())), g) for n, h, g in zip(names, hues(2), halves, strict=True)]
    page.head("Rewards of logged rollouts")
    page.histogram([group for group in groups if group[1]], "reward")


def _has_reward(row: Mapping[str, Any]) -> bool:
    reward = row.get("reward")
    return isinstance(row.get("step"), int) and isinstance(reward, int | float) and math.isfinite(reward)


def _first(run: RunFacts) -> str | None:
    best = run.spec.get("checkpoint", {}).get("best")
    return str(best) if best else None


def _headlines(run: RunFacts) -> list[str]:
    """First and last value of the metrics that matter, and their best."""
    lines = []
    for name in order_metrics([n for n in run.series if n in (*PREFERRED, _first(run))], _first(run)):
        series = run.series[name]
        (_, begin), (_, end) = series.points[0], series.last
        lines.append(f"{name}  {format_number(begin)} → {format_number(end)}")
    return lines or ["no metric was measured yet"]


def _evaluations(page: Page, run: RunFacts) -> None:
    """What `run eval` measured, the newest evaluations last."""
    newest = run.evaluations[-MOST_EVALUATIONS:]
    if not newest:
        return
    page.head("Evaluated afterwards")
    names = without_bounds(dict.fromkeys(name for one in newest for name in one["values"]))
    about = (f"step {one['step']}" if one["step"] is not None else one.get("suite", "") for one in newest)
    head = ["metric", *(f"{a}, {one['created'][:16].replace('T', ' ')}" for a, one in zip(about, newest, strict=True))]
    page.table(head, [TableRow([n, *(interval_text(n, one["values"]) for one in newest)]) for n in names])


def _times(page: Page, run: RunFacts) -> None:
    """Where the time went, by the sums over all steps."""
    sums = {name: sum(v for _, v in s.points) for name, s in run.series.items() if name.startswith("time/")}
    if not sums:
        return
    page.head("Total time, all steps")
    total = sum(sums.values()) or 1.0
    rows = [
        TableRow([name, format_duration(s), f"{s / total:.0%}"])
        for name, s in sorted(sums.items(), key=lambda x: -x[1])
    ]
    page.table(["part", "time", "share"], rows)


def _samples(page: Page, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    page.head("Newest samples")
    names = list(dict.fromkeys(name for row in rows for name in row if name != "images"))
    names.sort(key=lambda name: name in ("prompt", "answer"))
    shown = [{**row, "turns": _conversation(row["turns"])} if row.get("turns") else row for row in rows]
    cells = [TableRow([_text(row.get(name)) for name in names]) for row in shown]
    page.table(names, cells, wrap=True)


def _conversation(turns: Sequence[Mapping[str, Any]]) -> str:
    """Messages of an episode, one a line: what was said, the calls and their results."""
    lines = []
    for message in turns:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        made = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
        said = [str(message["content"])] if message["content"] else []
        lines.append(" ".join([f"{message['role']}:", *said, *made]))
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return redact(format_number(value) if isinstance(value, float) else str(value))


def _decisions(page: Page, run: RunFacts) -> None:
    made = run.manifest.get("decisions", [])
    facts = run.manifest.get("facts", [])
    if not made and not facts:
        return
    page.head("Automatic choices and facts")
    rows = [TableRow([d["feature"], d["got"], f"instead of {d['wanted']}: {d['reason']}"]) for d in made]
    rows += [TableRow([f["feature"], f["value"], f["reason"]]) for f in facts]
    page.table(["feature", "value", "why"], rows, wrap=True)


def _settings(page: Page, run: RunFacts) -> None:
    """What the command line and recipes set; the whole spec is in spec.yaml."""
    values = dict(iter_leaves(run.spec))
    chosen = {key: who for key, who in run.set_by.items() if key in values and who not in FILES and "/" not in who}
    chosen |= {key: who for key, who in run.set_by.items() if key in values and who.startswith("recipe")}
    if not run.typed and not chosen:
        return  # a whole spec was run as it was
    page.head("Options that were set")
    page.code(redact("run " + " ".join(run.typed)))
    rows = [TableRow([key, _flow(values[key]), who]) for key, who in chosen.items()]
    if rows:
        page.table(["key", "value", "set by"], rows)


def _flow(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n...\n").strip()
