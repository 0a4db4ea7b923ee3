"""Compare two runs: differences of config, code, versions and data, and the curves of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runner.run_dir.folder import RunFolder, display_path
from runner.spec.base import iter_leaves
from runner.spec.evaluation import without_bounds
from runner.tools.report.chart import Curve, hues, interval_curves
from runner.tools.report.page import Page, TableRow, order_metrics
from runner.tools.report.run_facts import RunFacts, Series, read_run
from runner.tracker.console import interval_text
from runner.tracker.text import MACHINE_METRICS, align_columns, escape_for_terminal, format_number, sparkline

ABSENT = "–"
SHORT = 12  # digits of a fingerprint
HEAD, SAME = ("what", "key", "A", "B"), "config, code, versions, device and data are the same"
SPARKS = 24  # columns of a curve on the screen


class Difference(NamedTuple):
    """Something that differs: where (config, code, version, device, data), what, and both values."""

    where: str
    name: str
    first: str
    second: str


def differences(a: RunFacts, b: RunFacts) -> list[Difference]:
    """What is not the same of two runs; empty where all that is known of them agrees."""
    found = _between("config", dict(iter_leaves(a.spec)), dict(iter_leaves(b.spec)))
    code = [run.manifest.get("code", {}) for run in (a, b)]
    found += _between("code", *({k: c[k] for k in ("commit", "branch", "dirty", "diff") if k in c} for c in code))
    found += _between("version", a.manifest.get("packages", {}), b.manifest.get("packages", {}))
    found += _between("version", *({"python": r.manifest.get("python", {}).get("version")} for r in (a, b)))
    found += _between("device", a.manifest.get("device", {}), b.manifest.get("device", {}))
    found += _between("environment", a.manifest.get("environment", {}), b.manifest.get("environment", {}))
    return found + _between("data", *({"fingerprint": run.data[:SHORT] or None} for run in (a, b)))


def diff_lines(first: RunFolder, second: RunFolder) -> list[str]:
    """The comparison for a terminal."""
    a, b = read_run(first), read_run(second)
    out = [f"A  {display_path(first.root)}", f"B  {display_path(second.root)}", ""]
    found = differences(a, b)
    out += align_columns([HEAD, *found]) if found else [SAME]
    named = [
        [n for n in order_metrics(without_bounds(r.series), None) if not n.startswith(MACHINE_METRICS)] for r in (a, b)
    ]
    if metrics := [name for name in named[0] if name in b.series]:
        rows = [_metric(name, a.series[name], b.series[name]) for name in metrics]
        out += ["", *align_columns([["metric", "step", "A", "", "B", "", "B − A"], *rows])]
        if any(a.series[name].last[0] != b.series[name].last[0] for name in metrics):
            out += ["A and B are compared at the newest step that both measured; the curves show all steps"]
    if evaluated := _evaluation_rows(a, b):
        out += ["", *align_columns(evaluated)]
    for name, mine, other in (("A", named[0], b), ("B", named[1], a)):
        alone = [metric for metric in mine if metric not in other.series]
        out += [f"only {name}: {', '.join(alone)}"] if alone else []
    return out


def _evaluation_rows(a: RunFacts, b: RunFacts) -> list[list[str]]:
    """A table of what `run eval` measured of both, its head first; empty where there is nothing."""
    others = b.newest_evaluations
    pairs = {name: (one, others[name]) for name, one in a.newest_evaluations.items() if name in others}
    rows = [row for name, pair in pairs.items() for row in _rows_of_set(name, *pair)]
    return [["run eval", "A", "B", "B − A"], *rows] if rows else []


def _rows_of_set(name: str, *records: Mapping[str, Any]) -> list[list[str]]:
    """What two evaluations of a set do not have in common, then the metrics that both have.

    There is no difference of metrics where questions or options differ, or a record is too old to have them.
    """
    models = [{key: one[key] for key in ("step", "checkpoint") if key in one} for one in records]
    known = [one.get("sets", {}).get(name) for one in records]
    unlike = [Difference(name, "questions and options", *("recorded" if own else "not recorded" for own in known))]
    if None not in known:
        unlike = _between(name, *known)
    rows = [[f"{name}: {one.name}", one.first, one.second, ""] for one in (*_between(name, *models), *unlike)]
    a, b = (one["values"] for one in records)
    for metric in without_bounds(a):
        if metric in b and metric.startswith(f"{name}/"):
            difference = ABSENT if unlike else f"{b[metric] - a[metric]:+.4g}"
            rows.append([metric, interval_text(metric, a), interval_text(metric, b), difference])
    return rows


def write_page(first: RunFolder, second: RunFolder, path: Path) -> None:
    """The comparison as a page. Raises StorageError."""
    a, b = read_run(first), read_run(second)
    page = Page(
        f"{a.spec.get('name')} and {b.spec.get('name')}",
        f"A {display_path(first.root)} · B {display_path(second.root)}",
    )
    colors = dict(zip("AB", hues(2), strict=True))
    page.table(
        ["run", "folder"],
        [TableRow([n, display_path(r.folder.root)], n, "", colors[n]) for n, r in (("A", a), ("B", b))],
    )
    page.head("Curves")
    curves: dict[str, list[Curve]] = {}
    for name, run in (("A", a), ("B", b)):
        for metric, curve in interval_curves(name, name, colors[name], run.series).items():
            curves.setdefault(metric, []).append(curve)
    page.charts(curves)
    if evaluated := _evaluation_rows(a, b):
        page.head("Evaluated afterwards")
        page.table(evaluated[0], [TableRow(row) for row in evaluated[1:]])
    page.head("What differs")
    if found := differences(a, b):
        page.table(HEAD, [TableRow(difference) for difference in found], wrap=True)
    else:
        page.text(SAME)
    page.write(path)


def _between(where: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    keys = dict.fromkeys([*a, *b])
    different = [k for k in keys if (k in a) != (k in b) or a.get(k) != b.get(k)]
    return [Difference(where, k, *(_value_text(k, values) for values in (a, b))) for k in different]


def _value_text(key: str, values: Mapping[str, Any]) -> str:
    if values.get(key) is None:
        return ABSENT if key not in values else "null"
    if key == "diff":
        text = str(values[key])
        return f"{text.count(chr(10))} lines changed since the commit" if text else "none"
    return escape_for_terminal(str(values[key]))


def _metric(name: str, a: Series, b: Series) -> list[str]:
    """The values at the newest step that both measured; without one, at both ends, and no difference."""
    first, second = a.by_step, b.by_step
    sparks = [sparkline([value for _, value in s.points], SPARKS) for s in (a, b)]
    if (step := max(first.keys() & second.keys(), default=None)) is None:
        ends = [f"{format_number(value)} (step {at})" for at, value in (a.last, b.last)]
        return [name, ABSENT, ends[0], sparks[0], ends[1], sparks[1], ABSENT]
    values = [format_number(first[step]), sparks[0], format_number(second[step]), sparks[1]]
    return [name, str(step), *values, f"{second[step] - first[step]:+.4g}"]
