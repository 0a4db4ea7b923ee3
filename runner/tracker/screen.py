"""What the live screen shows, as a pure function of what is known.

Progress (numbers, gathered step by step) ─▶ panel() ─▶ a rich renderable of at most `width` columns
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from runner.tracker.text import (
    escape_for_terminal,
    format_bytes,
    format_duration,
    format_number,
    format_rate,
    sparkline,
)

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text

Better = Literal["less", "more"]

# metrics.yaml: how the metrics of a run are shown, by their names
METRICS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8"))
MACHINE_METRICS: tuple[str, ...] = tuple(METRICS["machine"])
CURVES: dict[str, dict[str, Any]] = METRICS["curves"]
EQUAL = "reward/zero_variance"  # share of the groups that teach nothing; shown where there is any
SAMPLE_CHARACTERS = 400
POINTS = 512  # of a curve; beyond, neighbours are merged
RECENT = 50  # steps from which the time to go is estimated


@dataclass(slots=True)
class MetricCurve:
    """The course of one metric in at most POINTS means, its last value and its best."""

    better: Better
    points: list[float] = field(default_factory=list)
    last: float = math.nan
    best: float = math.nan
    best_step: int = 0
    _stride: int = 1
    _pending: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Take in the value of a step; constant time on average."""
        self.last = value
        if not math.isfinite(value):
            return
        if math.isnan(self.best) or (value < self.best if self.better == "less" else value > self.best):
            self.best, self.best_step = value, step
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self.points.append(math.fsum(self._pending) / self._stride)
            self._pending.clear()
        if len(self.points) >= POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._stride *= 2

    def series(self) -> list[float]:
        """The means so far, the unfinished one included."""
        return [*self.points, math.fsum(self._pending) / len(self._pending)] if self._pending else self.points


@dataclass(slots=True)
class Progress:
    """How far a run has come; `times` are seconds of a monotonic clock."""

    title: Mapping[str, Any]
    steps: int
    begin: float = field(default_factory=time.monotonic)
    step: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    now: Mapping[str, float] = field(default_factory=dict)  # what the last step measured
    curves: dict[str, MetricCurve] = field(default_factory=dict)
    last_sample: str = ""
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def update(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Take in a finished step."""
        self.step = step
        self.latest.update(metrics)
        self.now = dict(metrics)
        self.times.append((step, now))
        for name, one in CURVES.items():
            if name in metrics:
                self.curves.setdefault(name, MetricCurve(one["better"])).add(step, metrics[name])

    def remaining_s(self) -> float:
        """Seconds to go at the pace of the last steps; NaN before two steps are known."""
        if len(self.times) < 2:
            return math.nan
        (first, begin), (last, end) = self.times[0], self.times[-1]
        return (self.steps - self.step) * (end - begin) / max(last - first, 1)


def sample_line(row: Mapping[str, Any]) -> str:
    """One line of a sample: prompt → earlier turns → answer (expected answer or reward).

    Control characters are escaped.
    """
    if "prompt" not in row or "answer" not in row:
        facts = {k: format_number(v) if isinstance(v, float) else v for k, v in row.items() if v is not None}
        return _shorten("  ".join(f"{k}={v}" for k, v in facts.items()))
    said = [turn["content"] for turn in row.get("turns", ())]
    line = " → ".join([row["prompt"], *said, row["answer"]])
    if row.get("expected") not in (None, "", row["answer"]):
        line += f"  (expected {row['expected']})"
    if isinstance(row.get("reward"), int | float):
        line += f"  reward {format_number(row['reward'])}"
    return _shorten(line)


def _shorten(text: str) -> str:
    return escape_for_terminal(text if len(text) <= SAMPLE_CHARACTERS else text[: SAMPLE_CHARACTERS - 1] + "…")


def render_panel(progress: Progress, now: float, width: int) -> Panel:
    """The live screen."""
    from rich.box import ROUNDED
    from rich.panel import Panel
    from rich.text import Text

    inner = max(width - 4, 20)
    rows = [*_curve_rows(progress, inner), *_figure_rows(progress)]
    if progress.last_sample:
        rows.append(Text.assemble((f"{'last':12}", "dim"), progress.last_sample))
    for row in rows:
        row.truncate(inner, overflow="ellipsis")
    clock = f"{format_duration(now - progress.begin)} · ETA {format_duration(progress.remaining_s())}"
    state = f"step {progress.step}/{progress.steps} · {clock}"
    name = escape_for_terminal(str(progress.title.get("name", "run")))
    title = Text(f" {name} · {state} ")
    title.truncate(max(width - 6, 10), overflow="ellipsis")
    return Panel(Text("\n").join(rows), title=title, title_align="left", box=ROUNDED, width=width, border_style="dim")


def _curve_rows(progress: Progress, width: int) -> list[Text]:
    from rich.text import Text

    rows = []
    for name, one in CURVES.items():
        if curve := progress.curves.get(name):
            bars = sparkline(curve.series(), max(width - 48, 8))
            best = f"best {format_number(curve.best)} @ {curve.best_step}" if not math.isnan(curve.best) else ""
            rows.append(
                Text.assemble(
                    (f"{one['word']:12}", "dim"), f"{format_number(curve.last):>10}  ", (bars, "cyan"), "  ", best
                )
            )
    return rows or [Text("waiting for the first step", "dim")]


def _figure_rows(progress: Progress) -> list[Text]:
    from rich.text import Text

    shown = (
        ("speed", "perf/tokens_per_s", lambda v: f"{format_rate(v)} tok/s"),
        ("MFU", "perf/mfu", lambda v: f"{v:.1%}"),
        ("step time", "perf/step_s", lambda v: f"{format_number(v)} s"),
        ("memory", "perf/peak_memory_bytes", format_bytes),
        ("lr", "train/lr", format_number),
        ("grad norm", "train/grad_norm", format_number),
    )
    cells = [(word, worded(progress.latest[name])) for word, name, worded in shown if name in progress.latest]
    if (equal := progress.latest.get(EQUAL, 0)) > 0:
        cells.append(("equal groups", f"{equal:.0%}"))
    lines = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    return [Text.assemble(*(part for w, v in line for part in ((f"{w:13}", "dim"), f"{v:12}"))) for line in lines]
