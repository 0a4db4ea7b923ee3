"""One run's HTML report: numbers, curves, samples, automatic choices, settings, environment.

The page needs nothing but itself: style, script and charts are in it, and it may fetch nothing. Everything that a user,
a model or a log wrote is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.run_dir.folder import RunFolder, display_path, write_atomic
from runner.run_dir.manifest import redact
from runner.spec.base import iter_leaves
from runner.spec.evaluation import HIGH, LOW
from runner.tools.report.chart import Curve, Point, scatter_svg, svg
from runner.tools.report.run_facts import PREFERRED, RunFacts, read_run, whole_lines
from runner.tools.report.samples_grid import evaluated_samples, sample_row, samples_grid
from runner.tracker.text import format_duration, format_number

HERE = Path(__file__).parent
MOST_CHARTS = 24
UNSHOWN = ("perf/", "time/", "weight_sync/")  # behind the others, in a report that compares


@dataclass(frozen=True, slots=True)
class TableRow:
    """A table row; `key` ties it to a curve, `kind` names its look, `hue` gives it a dot in that colour."""

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
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A line."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        """A command, or what a program printed."""
        self.parts.append(f"<pre>{html.escape(text)}</pre>")

    def card(self, lines: Sequence[str], command: str = "") -> None:
        """What a reader should see first."""
        inner = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
        inner += f"<pre>{html.escape(command)}</pre>" if command else ""
        self.parts.append(f'<div class="card">{inner}</div>')

    def table(self, head: Sequence[str], rows: Sequence[TableRow], wrap: bool = False) -> None:
        """A table; `wrap` lets the last column break its lines."""
        names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join(_row(row, wrap) for row in rows)
        table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
        self.parts.append(f'<div class="scroll">{table}</div>')

    def charts(self, curves: Mapping[str, Sequence[Curve]], first: str | None = None) -> None:
        """A chart per metric, of which one is shown at a time; without scripts, all of them."""
        names = order_metrics(list(curves), first)
        shown = names[:MOST_CHARTS]
        if not shown:
            self.text("no metric was measured yet")
            return
        choices = "".join(f"<option>{html.escape(name)}</option>" for name in shown)
        self.parts.append(f'<p><select id="metric" aria-label="metric" hidden>{choices}</select></p>')
        for name in shown:
            caption = f'<figcaption class="faint">{html.escape(name)}</figcaption>'
            chart = svg(curves[name], f"{name} over the step, {len(curves[name])} curves")
            self.parts.append(f'<figure data-metric="{html.escape(name, quote=True)}">{caption}{chart}</figure>')
        if len(names) > len(shown):
            self.text(f"{len(names) - len(shown)} more metrics are in metrics.jsonl: {', '.join(names[len(shown) :])}")

    def scatter(self, points: Sequence[Point], x: str, y: str) -> None:
        """Two numbers of each job against each other."""
        caption = f'<figcaption class="faint">{html.escape(y)}</figcaption>'
        self.parts.append(f"<figure>{caption}{scatter_svg(points, x, y)}</figure>")

    def render(self) -> str:
        """The page."""
        style, script = _asset("page.css"), _asset("page.js")
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(script)}'; img-src data:"
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{html.escape(self.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
            f'<h1>{html.escape(self.title)}</h1>\n<p class="faint">{html.escape(self.about)}</p>\n'
            + "\n".join(self.parts)
            + f"\n<script>{script}</script>\n</body>\n</html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page. Raises StorageError."""
        write_atomic(path, self.render().encode("utf-8", "backslashreplace").decode("utf-8"))


def order_metrics(names: Sequence[str], first: str | None) -> list[str]:
    """Metrics in the order in which they are worth a look."""

    def rank(name: str) -> tuple[bool, int, bool, str]:
        place = PREFERRED.index(name) if name in PREFERRED else len(PREFERRED)
        return (name != first, place, name.startswith(UNSHOWN), name)

    return sorted(names, key=rank)


def _row(row: TableRow, wrap: bool) -> str:
    dot = "" if row.hue is None else f'<span class="dot" style="--hue:{row.hue}"></span>'
    cells = []
    for position, cell in enumerate(row.cells):
        kind = ' class="wrap"' if wrap and position == len(row.cells) - 1 else ""
        cells.append(f"<td{kind}>{dot if position == 0 else ''}{html.escape(cell)}</td>")
    key = f' data-key="{html.escape(row.key, quote=True)}"' if row.key else ""
    kind = f' class="{html.escape(row.kind, quote=True)}"' if row.kind else ""
    return f"<tr{key}{kind}>{''.join(cells)}</tr>"


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


HUE = 210
MOST_SAMPLES = 8
FILES = ("job", "spec.yaml")  # who set what nobody chose


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
        page.head("What went wrong")
        page.code(redact(str(run.status["error"])))
    page.head("Curves")
    page.charts(_curves(run), _first(run))
    page.parts += samples_grid(evaluated_samples(whole_lines(folder.samples), folder.samples))
    _times(page, run)
    _samples(page, folder)
    _decisions(page, run)
    _settings(page, run)
    page.head("Environment")
    page.table(["", "what"], [TableRow([name, value]) for name, value in run.environment.items()], wrap=True)
    page.write(path)


def _curves(run: RunFacts) -> dict[str, list[Curve]]:
    """A curve per metric, with its interval; the bounds are no curves of their own."""
    names = [name for name in run.series if not name.endswith((LOW, HIGH))]
    bounds = {name: (run.series.get(name + LOW), run.series.get(name + HIGH)) for name in names}
    return {
        name: [Curve(name, "", HUE, run.series[name], None if low is None or high is None else (low, high))]
        for name, (low, high) in bounds.items()
    }


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


def _times(page: Page, run: RunFacts) -> None:
    """Where the time went, by the sums over all steps."""
    sums = {name: sum(v for _, v in s.points) for name, s in run.series.items() if name.startswith("time/")}
    if not sums:
        return
    page.head("Where the time went")
    total = sum(sums.values()) or 1.0
    rows = [
        TableRow([name, format_duration(s), f"{s / total:.0%}"])
        for name, s in sorted(sums.items(), key=lambda x: -x[1])
    ]
    page.table(["part", "time", "share"], rows)


def _samples(page: Page, folder: RunFolder) -> None:
    path = folder.samples
    rows = [row for line in whole_lines(path)[-MOST_SAMPLES:] if (row := sample_row(line, path))]
    if not rows:
        return
    page.head("Newest samples")
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=lambda name: name in ("prompt", "answer"))
    cells = [TableRow([_text(row.get(name)) for name in names]) for row in rows]
    page.table(names, cells, wrap=True)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return redact(format_number(value) if isinstance(value, float) else str(value))


def _decisions(page: Page, run: RunFacts) -> None:
    made = run.manifest.get("decisions", [])
    facts = run.manifest.get("facts", [])
    if not made and not facts:
        return
    page.head("Decided and found")
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
    page.head("What was set")
    page.code(redact("run " + " ".join(run.typed)))
    rows = [TableRow([key, _flow(values[key]), who]) for key, who in chosen.items()]
    if rows:
        page.table(["key", "value", "set by"], rows)


def _flow(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n...\n").strip()
