"""Numbers and foreign text in one line of a terminal; curves of bounded size."""

from __future__ import annotations

import io
import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.fsync_io import format_bytes
from runner.tracker.text import (
    BARS,
    POINTS,
    MetricCurve,
    Progress,
    escape_controls,
    escape_for_terminal,
    format_duration,
    format_number,
    format_rate,
    render_panel,
    sample_line,
    sparkline,
)


@given(st.text())
def test_visible_text_has_nothing_a_terminal_obeys(text: str) -> None:
    shown = escape_for_terminal(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in "\u202e\u2066\u200f"]
    shown.encode("utf-8")


@pytest.mark.parametrize("text", ["plain", "größer → 你好 👍🏽", "▁█"])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert escape_for_terminal(text) == text


@given(st.lists(st.floats(), max_size=300), st.integers(0, 60))
def test_a_sparkline_fits_and_marks_its_extremes(values: list[float], width: int) -> None:
    values = [v for v in values if not abs(v) > 1e100]
    bars = sparkline(values, width)
    finite = [v for v in values if math.isfinite(v)]
    assert len(bars) == min(width, len(finite))
    assert set(bars) <= set(BARS)
    if 0 < len(finite) <= width and max(finite) - min(finite) > 0:
        assert bars[finite.index(max(finite))] == BARS[-1] and bars[finite.index(min(finite))] == BARS[0]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (format_number(0.0123456), "0.01235"), (format_number(1e-5), "1e-05"), (format_number(3.0), "3"),
        (format_number(12345.6), "12346"),
        (format_number(float("nan")), "nan"), (format_number(float("-inf")), "-inf"),
        (format_number(2**70), str(2**70)),
        (format_rate(950), "950"), (format_rate(12345), "12.3k"), (format_bytes(0), "0 B"),
        (format_bytes(41.23e9), "41.2 GB"),
        (format_duration(11.4), "00:11"), (format_duration(3723), "1:02:03"),
        (format_duration(3 * 86400 + 4 * 3600 + 300), "3d 04:05"),
        (format_duration(math.nan), "--:--"), (format_duration(-1), "00:00"), (format_duration(59.7), "01:00"),
    ],
)  # fmt: skip
def test_numbers_for_people(said: str, expected: str) -> None:
    assert said == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.sampled_from(["less", "more"]))
def test_a_curve_is_bounded_and_keeps_its_best_and_its_mean(values: list[float], better: str) -> None:
    curve = MetricCurve(better)  # type: ignore[arg-type]
    for step, value in enumerate(values, 1):
        curve.add(step, value)
    best = min(values) if better == "less" else max(values)
    assert (curve.best, curve.best_step) == (best, values.index(best) + 1)
    assert curve.last == values[-1]
    assert len(curve.series()) <= POINTS + 1
    whole = len(curve.points) * curve._stride
    assert math.isclose(math.fsum(curve.points) * curve._stride, math.fsum(values[:whole]), abs_tol=1e-3)


def test_a_curve_passes_over_what_is_not_finite() -> None:
    curve = MetricCurve("less")
    for step, value in enumerate([math.nan, 2.0, math.inf, 3.0], 1):
        curve.add(step, value)
    assert (curve.best, curve.best_step, curve.series()) == (2.0, 2, [2.0, 3.0])


def test_the_time_to_go_follows_the_recent_pace() -> None:
    progress = Progress({}, steps=1000, begin=0.0)
    assert math.isnan(progress.remaining_s())
    for step in range(1, 101):
        progress.update(step, {}, now=100.0 * step)
    for step in range(101, 201):
        progress.update(step, {}, now=10_000.0 + 2.0 * (step - 100))
    assert progress.remaining_s() == pytest.approx(800 * 2.0)


@pytest.mark.parametrize("width", [20, 40, 80, 100])
def test_no_line_of_the_panel_is_wider_than_the_screen(width: int) -> None:
    from rich.console import Console

    progress = Progress({"name": "a-very-long-name" * 8}, steps=10)
    names = ("train/loss", "eval/loss", "reward/mean", "eval/exact_match", "train/lr", "perf/step_s", "train/grad_norm")
    for step in range(1, 10):
        progress.update(step, dict.fromkeys(names, 1234.5678 * step), now=float(step))
    progress.last_sample = "你好 " * 100
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_panel(progress, 10.0, width))
    assert all(
        sum(2 if unicodedata.east_asian_width(c) == "W" else 1 for c in line) <= width
        for line in console.export_text().splitlines()
    )


def test_a_sample_in_one_line() -> None:
    assert sample_line({"prompt": "2+2\n", "answer": "5", "expected": "4"}) == "2+2\\n → 5  (expected 4)"
    assert sample_line({"prompt": "p", "answer": "a", "expected": "a", "reward": 0.5}) == "p → a  reward 0.5"
    turns = [{"role": "assistant", "content": "calc 2+2"}, {"role": "tool", "content": "4"}]
    assert sample_line({"prompt": "2+2", "turns": turns, "answer": "4"}) == "2+2 → calc 2+2 → 4 → 4"
    assert sample_line({"text": "a", "n": 1}) == "text=a  n=1"
    assert len(sample_line({"prompt": "x" * 10**6, "answer": ""})) <= 400


def test_harmless_text_keeps_its_lines_and_loses_what_a_terminal_obeys() -> None:
    assert escape_controls("a\tb\nc\u200eé\x1b[2J\r\x9b1m\x7f\udcff") == "a\tb\nc\u200eé\\x1b[2J\\r\\x9b1m\\x7f\\udcff"
