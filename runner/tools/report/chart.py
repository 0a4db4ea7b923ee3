"""Charts as inline SVG; the style sheet has colors and sizes.

    curves (name, hue, points) ─▶ ranges ─▶ round ticks ─▶ <svg>

Line charts have a line per curve, with its name on hover, and an area for its interval. Scatter charts have a point per
job; those of the Pareto front are filled.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from runner.spec.evaluation import HIGH, LOW, without_bounds
from runner.tools.report.run_facts import Series
from runner.tracker.text import format_number, format_rate

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 34  # margins
TICKS = 4
MOST_POINTS = 120  # of a curve
SMOOTHING = 0.6  # weight of the past in the smoothed curve
SMOOTHED_FROM = 10  # points: shorter curves are drawn as they are
BINS = 12  # of a histogram
LOG_SPAN = 10.0  # largest by smallest value above which a logarithmic axis is offered


@dataclass(frozen=True, slots=True)
class Curve:
    """A named series; `key` ties it to a row of a table, `hue` is an angle of the color circle.

    bounds: lower and upper bound of an interval around it; empty if it has none
    """

    name: str
    key: str
    hue: int
    series: Series
    bounds: tuple[Series, ...] = ()


def interval_curves(name: str, key: str, hue: int, found: Mapping[str, Series]) -> dict[str, Curve]:
    """A run's curve of each metric, with its interval as an area; the bounds are no curves of their own."""
    bounds = {metric: (found.get(metric + LOW), found.get(metric + HIGH)) for metric in without_bounds(found)}
    return {
        metric: Curve(name or metric, key, hue, found[metric], () if low is None or high is None else (low, high))
        for metric, (low, high) in bounds.items()
    }


def hues(count: int) -> list[int]:
    """`count` hues that are as far apart as can be, neighbors not alike."""
    step = next(s for s in range(max(round(count * 0.618), 1), 0, -1) if math.gcd(s, max(count, 1)) == 1)
    return [round(210 + i * 360 / max(count, 1) * step) % 360 for i in range(count)]


def svg(curves: Sequence[Curve], label: str, most: int = MOST_POINTS) -> str:
    """A chart of the curves over the step, at most `most` points each.

    `label` is its text for screen readers.
    Where all values are positive and span more than LOG_SPAN, a second drawing has a logarithmic axis. The page shows
    one of both.
    """
    thin = [
        replace(
            curve, series=curve.series.downsample(most), bounds=tuple(bound.downsample(most) for bound in curve.bounds)
        )
        for curve in curves
        if curve.series.points
    ]
    xs = [step for curve in thin for step, _ in curve.series.points]
    ys = [value for curve in thin for one in (curve.series, *curve.bounds) for _, value in one.points]
    if not xs:
        return "<p>no values yet</p>"
    across, low, high = axis_of(min(0, *xs), max(xs)), min(ys), max(ys)
    linear = _lines(thin, label, across, axis_of(low, high))
    if low <= 0 or high / low <= LOG_SPAN:
        return linear
    log_axis = _lines(thin, f"{label}, logarithmic", across, log_axis_of(low, high))
    return f'<div class="log">{log_axis}</div><div class="linear">{linear}</div>'


def _lines(curves: Sequence[Curve], label: str, across: Axis, up: Axis) -> str:
    """Bands, raw curves and smoothed curves."""
    marks = [_band(curve, across, up) for curve in curves if curve.bounds]
    for curve in curves:
        is_long = len(curve.series.points) >= SMOOTHED_FROM
        marks.append(_line(curve, curve.series.points, across, up, "curve raw" if is_long else "curve"))
        if is_long:
            marks.append(_line(curve, curve.series.smooth(SMOOTHING).points, across, up, "curve smooth"))
    return _drawing(label, across, up, "step", marks)


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
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis_of(low: float, high: float) -> Axis:
    """An axis that holds both ends, with about TICKS round ticks; a single value gets room around it."""
    if high - low <= abs(high) * 1e-9:
        low, high = (high - abs(high) * 0.1, high + abs(high) * 0.1) if high else (0.0, 1.0)
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks = tuple(i * step for i in range(first, math.floor(high / step + 1e-9) + 1))
    return Axis(low, high, ticks)


def log_axis_of(low: float, high: float) -> Axis:
    """A logarithmic axis with at most TICKS powers of ten as ticks, or both ends."""
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    ticks = tuple(10.0**power for power in powers[:: math.ceil(len(powers) / TICKS) or 1])
    return Axis(low, high, ticks if len(ticks) > 1 else (low, high), is_log=True)


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
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_tick(tick)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{below}</text>')
    return "".join(parts)


def _line(curve: Curve, points: Sequence[tuple[int, float]], across: Axis, up: Axis, kind: str) -> str:
    places = [(f"{x_of(across, step):.1f}", f"{y_of(up, value):.1f}") for step, value in points]
    if len(places) == 1:
        [(x, y)] = places
        return _mark("circle", curve, f'cx="{x}" cy="{y}" r="4"')
    return _mark("polyline", curve, f'points="{" ".join(map(",".join, places))}"', kind)


def _band(curve: Curve, across: Axis, up: Axis) -> str:
    """The interval around a curve as an area; a vertical line where it has one point."""
    low, high = (bound.points for bound in curve.bounds)
    places = [f"{x_of(across, step):.1f},{y_of(up, value):.1f}" for step, value in (*low, *reversed(high))]
    return f'<polygon class="band" style="--hue:{curve.hue}" points="{" ".join(places)}"/>'


def _mark(tag: str, of: Curve | Point, place: str, kind: str = "curve") -> str:
    """A shape in its color, tied to its row, with its name on hover."""
    shared = f'class="{kind}" data-key="{html.escape(of.key, quote=True)}" style="--hue:{of.hue}"'
    return f"<{tag} {shared} {place}><title>{html.escape(of.name)}</title></{tag}>"


def _tick(value: float) -> str:
    return format_rate(value) if value >= 1e4 else format_number(float(f"{value:.3g}"))


@dataclass(frozen=True, slots=True)
class Point:
    """A job's two numbers; `key` ties it to a row of a table, `chosen` are filled.

    half_width: of the interval around y, 0 for none
    """

    name: str
    key: str
    hue: int
    x: float
    y: float
    chosen: bool
    half_width: float = 0.0


def scatter_svg(points: Sequence[Point], x: str, y: str) -> str:
    """A chart of the points; `x` and `y` name the axes."""
    if not points:
        return "<p>no values yet</p>"
    right = [point.x for point in points]
    up = [point.y + sign * point.half_width for point in points for sign in (-1, 1)]
    is_log = min(right) > 0 and (max(right) / min(right) > LOG_SPAN or _are_ratios_more_even(right))
    across = (log_axis_of if is_log else axis_of)(min(right), max(right))
    upward = axis_of(min(up), max(up))
    dots = [_dot(point, across, upward) for point in points]
    return _drawing(f"{y} against {x}, {len(points)} points", across, upward, f"{x}, logarithmic" * is_log or x, dots)


def _are_ratios_more_even(values: Sequence[float]) -> bool:
    """Whether positive values are spaced by a factor (1e-4, 2e-4, 4e-4) rather than by a difference."""
    steps = list(pairwise(sorted(set(values))))
    ratios, differences = [high / low for low, high in steps], [high - low for low, high in steps]
    return len(steps) > 1 and max(ratios) / min(ratios) < max(differences) / min(differences)


def _dot(point: Point, across: Axis, up: Axis) -> str:
    kind = "curve" if point.chosen else "curve hollow"
    x, y = x_of(across, point.x), y_of(up, point.y)
    ends = [f"{x:.1f},{y_of(up, point.y + sign * point.half_width):.1f}" for sign in (-1, 1)]
    bar = _mark("polyline", point, f'points="{" ".join(ends)}"') if point.half_width else ""
    return bar + _mark("circle", point, f'cx="{x:.1f}" cy="{y:.1f}" r="5"', kind)


def histogram_svg(groups: Sequence[tuple[Curve, Sequence[float]]], label: str) -> str:
    """Share of each group's values in each of BINS bins; `label` names the values."""
    values = [value for _, group in groups for value in group]
    across = axis_of(min(values), max(values))
    edges = [across.low + (across.high - across.low) * i / BINS for i in range(BINS + 1)]
    counts = [[0] * BINS for _ in groups]
    for count, (_, group) in zip(counts, groups, strict=True):
        for value in group:
            count[min(int(across.at(value) * BINS), BINS - 1)] += 1
    shares = [[one / max(sum(count), 1) for one in count] for count in counts]
    up = axis_of(0, max(map(max, shares)))
    bars = []
    for number, ((curve, _), share) in enumerate(zip(groups, shares, strict=True)):
        for left, right, height in zip(edges, edges[1:], share, strict=False):
            width = (x_of(across, right) - x_of(across, left)) * 0.9 / len(groups)
            x, y = x_of(across, left) + number * width, y_of(up, height)
            place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
            bars += [_mark("rect", curve, place)] if height else []
    return _drawing(f"histogram of {label}", across, up, label, bars)
