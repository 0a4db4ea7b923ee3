"""Charts: they hold every point, their axes are round, and what they show can do no harm."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.tools.report.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MOST_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Curve,
    Point,
    axis_of,
    hues,
    log_axis_of,
    scatter_svg,
    svg,
)
from runner.tools.report.run_facts import Series

VALUES = st.floats(-1e12, 1e12, allow_nan=False).map(lambda v: 0.0 if abs(v) < 1e-9 else v)


def curve(points: list[tuple[int, float]], name: str = "a") -> Curve:
    return Curve(name, "0", 10, Series(tuple(points)))


@given(st.lists(VALUES, min_size=1, max_size=40))
def test_every_point_lies_within_the_frame(values: list[float]) -> None:
    root = ET.fromstring(f"<div>{svg([curve(list(enumerate(values, 1)))], 'x')}</div>")
    for line in root.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


@given(VALUES, VALUES)
def test_ticks_are_few_round_and_within(a: float, b: float) -> None:
    axis = axis_of(min(a, b), max(a, b))
    assert axis.low <= min(a, b) and axis.high >= max(a, b) and 1 <= len(axis.ticks) <= 12
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else 1.0
    lead = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(lead - round_) for round_ in (1, 2, 2.5, 5, 10)) < 1e-3 or len(axis.ticks) == 1


def test_higher_values_are_drawn_higher_and_later_steps_further_right() -> None:
    root = ET.fromstring(svg([curve([(1, 0.0), (2, 5.0), (3, 1.0)])], "x"))
    [line] = root.iter("polyline")
    (x1, y1), (x2, y2), (x3, y3) = (map(float, p.split(",")) for p in line.attrib["points"].split())
    assert x1 < x2 < x3 and y2 < y3 < y1


def test_a_logarithmic_axis_has_equal_distances_for_equal_ratios() -> None:
    axis = log_axis_of(0.1, 1000.0)
    assert [axis.at(v) for v in (0.1, 10.0, 1000.0)] == pytest.approx([0.0, 0.5, 1.0])
    assert axis.ticks == pytest.approx((0.1, 10.0, 1000.0)) and log_axis_of(2.0, 60.0).ticks == (2.0, 60.0)
    drawings = ET.fromstring(f"<div>{svg([curve([(1, 1.0), (2, 100.0)])], 'x')}</div>")
    assert [part.attrib["class"] for part in drawings] == ["log", "linear"]
    assert "log" not in svg([curve([(1, 0.0), (2, 100.0)])], "x")


def test_names_are_escaped() -> None:
    root = ET.fromstring(svg([curve([(1, 1.0), (2, 2.0)], "</title><script>")], '"<x>'))
    assert [t.text for t in root.iter("title")] == ["</title><script>"] and root.attrib["aria-label"] == '"<x>'


def test_long_curves_are_thinned_to_means() -> None:
    series = Series(tuple((step, float(step % 2)) for step in range(1, 10_001)))
    thin = series.downsample(MOST_POINTS)
    assert len(thin.points) <= MOST_POINTS and thin.last[0] == 10_000
    assert all(value == pytest.approx(0.5, abs=0.02) for _, value in thin.points)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 100])
def test_hues_are_distinct(count: int) -> None:
    assert len(set(hues(count))) == count


def test_a_single_value_is_a_dot_and_none_says_so() -> None:
    assert len(list(ET.fromstring(svg([curve([(3, 1.0)])], "x")).iter("circle"))) == 1
    assert svg([], "x") == "<p>no values yet</p>"


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1e-4, 2e-4, 4e-4], True), ([1, 3, 10], True), ([8, 16, 24], False), ([1, 2], False), ([1, 100], True)],
)
def test_values_that_are_spaced_by_a_factor_get_a_logarithmic_axis(values: list[float], is_log: bool) -> None:
    points = [Point(str(x), "", 0, x, x, True) for x in values]
    assert ("x, logarithmic" in scatter_svg(points, "x", "y")) is is_log
