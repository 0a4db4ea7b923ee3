"""Charts as inline SVG. Lines: axes, one line per curve, its name on hover. Colours and sizes are the style sheet's.

curves (name, hue, points) ─▶ ranges ─▶ round ticks ─▶ <svg>

Points: two numbers per job; those that no other beats are filled.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from runner.tools.report.run_facts import Series
from runner.tracker.text import format_number

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 14, 40  # margins
TICKS = 5
MOST_POINTS = 240  # of a curve: more than a screen shows
FEWEST_POINTS = 30
POINTS = 6000  # of all curves of a chart, where they are many


@dataclass(frozen=True, slots=True)
class Curve:
    """A named series; `key` ties it to a row of a table, `hue` is an angle of the colour circle.

    bounds: lower and upper bound of an interval around it, if it has one
    """

    name: str
    key: str
    hue: int
    series: Series
    bounds: tuple[Series, Series] | None = None


def hues(count: int) -> list[int]:
    """`count` hues that are as far apart as can be, neighbours not alike."""
    return [round(210 + i * 360 / max(count, 1) * _stride(count)) % 360 for i in range(count)]


def svg(curves: Sequence[Curve], label: str) -> str:
    """A chart of the curves over the step. `label` says what it shows, for those who hear it."""
    most = min(max(POINTS // max(len(curves), 1), FEWEST_POINTS), MOST_POINTS)
    thin = [(curve, curve.series.downsample(most).points) for curve in curves if curve.series.points]
    xs = [step for _, points in thin for step, _ in points]
    ys = [value for _, points in thin for _, value in points]
    ys += [value for curve, _ in thin for bound in curve.bounds or () for _, value in bound.points]
    if not xs:
        return "<p>no values yet</p>"
    across, up = axis_of(min(0, *xs), max(xs)), axis_of(min(ys), max(ys))
    bands = [_band(curve, curve.bounds, most, across, up) for curve, _ in thin if curve.bounds]
    lines = [_line(curve, points, across, up) for curve, points in thin]
    return _drawing(label, across, up, "step", [*bands, *lines])


def _drawing(label: str, across: Axis, up: Axis, below: str, marks: Sequence[str]) -> str:
    """`marks` over the lines and numbers of both axes."""
    body = "".join([grid(across, up, html.escape(below)), *marks])
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label, quote=True)}">{body}</svg>'


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values and its round ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def axis_of(low: float, high: float) -> Axis:
    """An axis that holds both ends, with about TICKS round ticks; a single value gets room around it."""
    if high - low <= abs(high) * 1e-9:
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks = tuple(i * step for i in range(first, math.floor(high / step + 1e-9) + 1))
    return Axis(low, high, ticks)


def x_of(axis: Axis, value: float) -> float:
    """Where a value of the horizontal axis is drawn."""
    return LEFT + axis.at(value) * (WIDTH - LEFT - RIGHT)


def y_of(axis: Axis, value: float) -> float:
    """Where a value of the vertical axis is drawn."""
    return HEIGHT - BOTTOM - axis.at(value) * (HEIGHT - TOP - BOTTOM)


def grid(across: Axis, up: Axis, below: str) -> str:
    """Lines and numbers of both axes; `below` names the horizontal one, already escaped."""
    parts = []
    for tick in up.ticks:
        y = y_of(up, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for tick in across.ticks:
        x = x_of(across, tick)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{_tick(tick)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{below}</text>')
    return "".join(parts)


def _line(curve: Curve, points: Sequence[tuple[int, float]], across: Axis, up: Axis) -> str:
    places = [(f"{x_of(across, step):.1f}", f"{y_of(up, value):.1f}") for step, value in points]
    if len(places) == 1:
        [(x, y)] = places
        return _mark("circle", curve, f'cx="{x}" cy="{y}" r="4"')
    return _mark("polyline", curve, f'points="{" ".join(map(",".join, places))}"')


def _band(curve: Curve, bounds: tuple[Series, Series], most: int, across: Axis, up: Axis) -> str:
    """The interval around a curve as an area; a vertical line where it has one point."""
    low, high = (bound.downsample(most).points for bound in bounds)
    places = [f"{x_of(across, step):.1f},{y_of(up, value):.1f}" for step, value in (*low, *reversed(high))]
    return f'<polygon class="band" style="--hue:{curve.hue}" points="{" ".join(places)}"/>'


def _mark(tag: str, of: Curve | Point, place: str, kind: str = "curve") -> str:
    """A shape in its colour, tied to its row, with its name on hover."""
    shared = f'class="{kind}" data-key="{html.escape(of.key, quote=True)}" style="--hue:{of.hue}"'
    return f"<{tag} {shared} {place}><title>{html.escape(of.name)}</title></{tag}>"


def _tick(value: float) -> str:
    return format_number(float(f"{value:.10g}"))


def _stride(count: int) -> int:
    """A number of hues to go on by that visits all of them, near the golden section."""
    wanted = max(round(count * 0.618), 1)
    return next(s for s in range(wanted, 0, -1) if math.gcd(s, max(count, 1)) == 1)


@dataclass(frozen=True, slots=True)
class Point:
    """A job's two numbers; `key` ties it to a row of a table, `chosen` are filled."""

    name: str
    key: str
    hue: int
    x: float
    y: float
    chosen: bool


def scatter_svg(points: Sequence[Point], x: str, y: str) -> str:
    """A chart of the points; `x` and `y` name the axes."""
    if not points:
        return "<p>no values yet</p>"
    right, up = [point.x for point in points], [point.y for point in points]
    across, upward = axis_of(min(right), max(right)), axis_of(min(up), max(up))
    dots = [_dot(point, x_of(across, point.x), y_of(upward, point.y)) for point in points]
    return _drawing(f"{y} against {x}, {len(points)} jobs", across, upward, x, dots)


def _dot(point: Point, x: float, y: float) -> str:
    kind = "curve" if point.chosen else "curve hollow"
    return _mark("circle", point, f'cx="{x:.1f}" cy="{y:.1f}" r="5"', kind)
