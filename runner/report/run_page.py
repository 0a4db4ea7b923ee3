"""report.html of one run: how its numbers moved, its curves, samples, decisions, what was set, environment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import yaml

from runner.folder import RunFolder, shown
from runner.manifest import redact
from runner.report.chart import Curve
from runner.report.facts import Run, read_run
from runner.report.page import Page, Row, ordered
from runner.report.series import PREFERRED
from runner.spec.origin import leaves
from runner.tracker.text import duration, number

log = logging.getLogger("runner")

HUE = 210
MOST_SAMPLES = 8
FILES = ("job", "spec.yaml")  # who set what nobody chose


def write_page(folder: RunFolder, path: Path) -> None:
    """Write a run's report. Raises StorageError, EnvironmentProblem."""
    run = read_run(folder)
    state = str(run.status.get("state", "unknown"))
    steps = max((series.last[0] for series in run.series.values()), default=0)
    page = Page(
        str(run.spec.get("name", "run")), f"{state} · step {steps}/{run.spec.get('steps')} · {shown(folder.root)}"
    )
    page.card(_headlines(run), redact(f"run --spec {shown(folder.spec)}"))
    if run.status.get("error"):
        page.head("What went wrong")
        page.code(redact(str(run.status["error"])))
    page.head("Curves")
    page.charts({name: [Curve(name, "", HUE, series)] for name, series in run.series.items()}, _first(run))
    _times(page, run)
    _samples(page, folder)
    _decisions(page, run)
    _settings(page, run)
    page.head("Environment")
    page.table(["", "what"], [Row([name, value]) for name, value in run.environment.items()], wrap=True)
    page.write(path)


def _first(run: Run) -> str | None:
    best = run.spec.get("checkpoint", {}).get("best")
    return str(best) if best else None


def _headlines(run: Run) -> list[str]:
    """First and last value of the metrics that matter, and their best."""
    lines = []
    for name in ordered([n for n in run.series if n in (*PREFERRED, _first(run))], _first(run)):
        series = run.series[name]
        (_, begin), (_, end) = series.points[0], series.last
        lines.append(f"{name}  {number(begin)} → {number(end)}")
    return lines or ["no metric was measured yet"]


def _times(page: Page, run: Run) -> None:
    """Where the time went, by the sums over all steps."""
    sums = {name: sum(v for _, v in s.points) for name, s in run.series.items() if name.startswith("time/")}
    if not sums:
        return
    page.head("Where the time went")
    total = sum(sums.values()) or 1.0
    rows = [Row([name, duration(s), f"{s / total:.0%}"]) for name, s in sorted(sums.items(), key=lambda x: -x[1])]
    page.table(["part", "time", "share"], rows)


def _samples(page: Page, folder: RunFolder) -> None:
    rows = _last_samples(folder.samples)
    if not rows:
        return
    page.head("Newest samples")
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=lambda name: name in ("prompt", "answer"))
    cells = [Row([_text(row.get(name)) for name in names]) for row in rows]
    page.table(names, cells, wrap=True)


def _last_samples(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    whole = [line for line in lines if line.endswith("\n")]
    return [row for line in whole[-MOST_SAMPLES:] if (row := _sample(line, path))]


def _sample(line: str, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        log.warning("%s: a line is damaged and left out (%s)", path, error)
        return {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return redact(number(value) if isinstance(value, float) else str(value))


def _decisions(page: Page, run: Run) -> None:
    made = run.manifest.get("decisions", [])
    facts = run.manifest.get("facts", [])
    if not made and not facts:
        return
    page.head("Decided and found")
    rows = [Row([d["feature"], d["got"], f"instead of {d['wanted']}: {d['reason']}"]) for d in made]
    rows += [Row([f["feature"], f["value"], f["reason"]]) for f in facts]
    page.table(["feature", "value", "why"], rows, wrap=True)


def _settings(page: Page, run: Run) -> None:
    """What the command line and recipes set; the whole spec is in spec.yaml."""
    values = dict(leaves(run.spec))
    chosen = {key: who for key, who in run.set_by.items() if key in values and who not in FILES and "/" not in who}
    chosen |= {key: who for key, who in run.set_by.items() if key in values and who.startswith("recipe/")}
    if not run.typed and not chosen:
        return  # a whole spec was run as it was
    page.head("What was set")
    page.code(redact("run " + " ".join(run.typed)))
    rows = [Row([key, _flow(values[key]), who]) for key, who in chosen.items()]
    if rows:
        page.table(["key", "value", "set by"], rows)


def _flow(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n...\n").strip()
