"""Formatting of numbers and untrusted text for a terminal, and the panel of the live screen."""

from __future__ import annotations

import html
import math
import os
import time
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TextIO

from runner.core.fsync_io import format_bytes
from runner.core.package import read_table

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text


BARS = "▁▂▃▄▅▆▇█"
# Characters that a terminal interprets instead of showing: controls, line and paragraph separators, surrogates, and
# marks of text direction.
HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
BIDI = frozenset(map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def escape_for_terminal(text: str) -> str:
    """The text on one line with every control character written out, such as \\n or \\x1b."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in HIDDEN or c in BIDI else c for c in text)


def escape_controls(text: str) -> str:
    """The text with its lines and tabs; other controls (C0, C1) and lone surrogates are escaped."""
    return "".join(_escape(c) if unicodedata.category(c) in {"Cc", "Cs"} and c not in "\n\t" else c for c in text)


def escape_html(text: str, most: int) -> str:
    """The text for an HTML page: controls escaped, cut with a mark after `most` characters."""
    shown = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return html.escape(escape_controls(shown))


def print_text(text: str, *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text with control characters escaped: it may have names from a file or a web page."""
    print(escape_controls(text), end=end, file=file, flush=flush)


def discard_output(stream: TextIO) -> None:
    """Discard what is written to a stream without a reader: Python's last flush changes the exit code."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:  # a stream in memory has no descriptor
        os.dup2(nowhere.fileno(), stream.fileno())


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def labeled_line(word: str, text: str) -> str:
    """A line that begins with a word of at most 8 letters in its own column."""
    return f"{word:<8}  {text}"


def format_number(value: float) -> str:
    """Four significant digits: 0.01234, 1.2e-05, 12345."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e9):
        return str(int(value))
    if math.isfinite(value) and abs(value) >= 1000:
        return f"{value:.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4g}"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text with aligned columns."""
    cells = [[escape_for_terminal(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def count_noun(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_rate(value: float) -> str:
    """A count per second: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def format_metric(name: str, value: float) -> str:
    """The value of a metric in the unit that its name ends in, bytes or a plain number."""
    return format_bytes(value) if name.endswith("bytes") else format_number(value)


def format_duration(seconds: float) -> str:
    """00:11, 1:02:03, 3d 04:05."""
    if not math.isfinite(seconds):
        return "--:--"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` bars from the smallest to the largest value, without values that are not finite."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1) + 0.5)] if span > 0 else BARS[0] for v in means)


Better = Literal["less", "more"]

# metrics.yaml: how the metrics of a run are shown, by their names
METRICS: dict[str, Any] = read_table(__file__, "metrics.yaml")
MACHINE_METRICS: tuple[str, ...] = tuple(METRICS["machine"])
CURVES: dict[str, dict[str, Any]] = METRICS["curves"]
HEALTH: dict[str, str] = METRICS["health"]  # metric → its name in the panel
EQUAL = "reward/zero_variance"  # share of groups without a gradient; shown if it is above 0
SAMPLE_CHARACTERS = 400
POINTS = 512  # of a curve; with more, neighbors are merged
RECENT = 50  # steps from which the remaining time is estimated


def with_health_panel(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and copies of those of HEALTH as health/NAME: trackers show a prefix as one panel."""
    return {**metrics, **{f"health/{word}": metrics[name] for name, word in HEALTH.items() if name in metrics}}


@dataclass(slots=True)
class MetricCurve:
    """The curve of one metric in at most POINTS means, its last value and its best."""

    better: Better
    points: list[float] = field(default_factory=list)
    last: float = math.nan
    best: float = math.nan
    best_step: int = 0
    _stride: int = 1
    _pending: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step; constant time on average."""
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
        """The means so far, including the incomplete one."""
        return [*self.points, math.fsum(self._pending) / len(self._pending)] if self._pending else self.points


@dataclass(slots=True)
class Progress:
    """The progress of a run; times: (step, seconds of a monotonic clock)."""

    title: Mapping[str, Any]
    steps: int
    begin: float = field(default_factory=time.monotonic)
    step: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    now: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    curves: dict[str, MetricCurve] = field(default_factory=dict)
    last_sample: str = ""
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def update(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Update a finished step."""
        self.step = step
        self.latest.update(metrics)
        self.now = dict(metrics)
        self.times.append((step, now))
        for name, one in CURVES.items():
            if name in metrics:
                self.curves.setdefault(name, MetricCurve(one["better"])).add(step, metrics[name])

    def remaining_s(self) -> float:
        """Remaining seconds at the pace of the last steps; NaN before the second step."""
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
    turns = [turn["content"] for turn in row.get("turns", ())]
    line = " → ".join([row["prompt"], *turns, row["answer"]])
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
            head, last = (f"{one['word']:12}", "dim"), f"{format_number(curve.last):>10}  "
            rows.append(Text.assemble(head, last, (bars, "cyan"), "  ", best))
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
