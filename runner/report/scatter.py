"""Two numbers per job as points of an inline SVG chart: those that no other beats are filled."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from runner.report.chart import HEIGHT, WIDTH, axis_of, grid, x_of, y_of


@dataclass(frozen=True, slots=True)
class Point:
    """A job's two numbers; `key` ties it to a row of a table, `chosen` are filled."""

    name: str
    key: str
    hue: int
    x: float
    y: float
    chosen: bool


def svg(points: Sequence[Point], x: str, y: str) -> str:
    """A chart of the points; `x` and `y` name the axes."""
    if not points:
        return "<p>no values yet</p>"
    right, up = [point.x for point in points], [point.y for point in points]
    across, upward = axis_of(min(right), max(right)), axis_of(min(up), max(up))
    dots = "".join(_dot(point, x_of(across, point.x), y_of(upward, point.y)) for point in points)
    said = html.escape(f"{y} against {x}, {len(points)} jobs", quote=True)
    lines = grid(across, upward, html.escape(x))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">{lines}{dots}</svg>'


def _dot(point: Point, x: float, y: float) -> str:
    kind = "curve" if point.chosen else "curve hollow"
    shared = f'class="{kind}" data-key="{html.escape(point.key, quote=True)}" style="--hue:{point.hue}"'
    return f'<circle {shared} cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{html.escape(point.name)}</title></circle>'
