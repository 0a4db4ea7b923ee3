"""One HTML page that needs nothing but itself: style, script and charts stand in it, and it may fetch nothing.

Everything that a user, a model or a log said is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.folder import write_atomic
from runner.report import scatter
from runner.report.chart import Curve, svg
from runner.report.scatter import Point
from runner.report.series import PREFERRED

HERE = Path(__file__).parent
MOST_CHARTS = 24
UNSHOWN = ("perf/", "time/")  # behind the others, in a report that compares


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table; `key` ties it to a curve, `kind` names its look, `hue` gives it a dot of the curve's colour."""

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

    def table(self, head: Sequence[str], rows: Sequence[Row], wrap: bool = False) -> None:
        """A table; `wrap` lets the last column break its lines."""
        names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join(_row(row, wrap) for row in rows)
        table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
        self.parts.append(f'<div class="scroll">{table}</div>')

    def charts(self, curves: Mapping[str, Sequence[Curve]], first: str | None = None) -> None:
        """A chart per metric, of which one is shown at a time; without scripts, all of them."""
        names = ordered(list(curves), first)
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
        self.parts.append(f"<figure>{caption}{scatter.svg(points, x, y)}</figure>")

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


def ordered(names: Sequence[str], first: str | None) -> list[str]:
    """Metrics in the order in which they are worth a look."""

    def rank(name: str) -> tuple[bool, int, bool, str]:
        place = PREFERRED.index(name) if name in PREFERRED else len(PREFERRED)
        return (name != first, place, name.startswith(UNSHOWN), name)

    return sorted(names, key=rank)


def _row(row: Row, wrap: bool) -> str:
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
