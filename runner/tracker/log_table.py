"""Progress in a file: a table with a row now and then, and lines below it for what was evaluated and sampled.

Progress ─▶ LogTable ─▶    step    loss ...     a header every 50 rows
                         50/200  0.2588 ...     columns: those of METRICS["columns"] that the run measures
                         eval      step=50 eval/loss=0.2522
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.tracker.screen import METRICS, Progress
from runner.tracker.text import format_bytes, format_duration, format_number, format_rate, labeled_line

COLUMNS: dict[str, dict[str, Any]] = METRICS["columns"]
LINE_WIDTH = 82  # with the time stamp and the level in run.log: 120
HEADER_EVERY = 50  # rows
TIME_WIDTH = 8  # of 12d04:05


@dataclass(slots=True)
class LogTable:
    """The rows of one run; the columns are chosen at its first row, and again where a step measures a new one."""

    _columns: list[str] = field(default_factory=list)
    _rows: int = 0  # since the last header

    def lines(self, progress: Progress, now: float) -> list[str]:
        """The last step's row, the header before it where one is due, and the held-out values after it."""
        measured = [name for name in COLUMNS if name in progress.now or name in self._columns]
        columns = _fit_columns(measured, _step_width(progress))
        header = []
        if columns != self._columns or self._rows == HEADER_EVERY:
            self._columns, self._rows = columns, 0
            heads = [COLUMNS[name]["head"].rjust(_width(name)) for name in columns]
            times = [head.rjust(TIME_WIDTH) for head in ("elapsed", "ETA")]
            header = [" ".join(["step".rjust(_step_width(progress)), *heads, *times])]
        self._rows += 1
        return [*header, self._row(progress, now), *eval_lines(progress.step, progress.now)]

    def _row(self, progress: Progress, now: float) -> str:
        cells = [_cell(name, progress.now.get(name)) for name in self._columns]
        times = [
            format_duration(seconds).replace(" ", "") for seconds in (now - progress.begin, progress.remaining_s())
        ]
        step = f"{progress.step}/{progress.steps}".rjust(_step_width(progress))
        return " ".join([step, *cells, *(time.rjust(TIME_WIDTH) for time in times)])


def eval_lines(step: int, metrics: Mapping[str, float]) -> list[str]:
    """The held-out values of a step as `name=value`; none where the step measured none."""
    pairs = [f"{name}={format_number(value)}" for name, value in metrics.items() if name.startswith("eval/")]
    return _wrap_text("eval", " ".join([f"step={step}", *pairs])) if pairs else []


def sample_lines(line: str) -> list[str]:
    """A sample (`sample_line`), wrapped."""
    return _wrap_text("sample", line)


def _wrap_text(word: str, text: str) -> list[str]:
    indent = labeled_line("", "")
    lines = textwrap.wrap(text, LINE_WIDTH - len(indent), break_on_hyphens=False) or [""]
    return [labeled_line(word if index == 0 else "", line) for index, line in enumerate(lines)]


def _step_width(progress: Progress) -> int:
    return max(2 * len(str(progress.steps)) + 1, len("999/999"))


def _width(name: str) -> int:
    return max(int(COLUMNS[name]["width"]), len(COLUMNS[name]["head"]))


def _fit_columns(names: list[str], step_width: int) -> list[str]:
    """The columns without the least important ones, so that a row has at most LINE_WIDTH characters."""
    left = list(names)
    for name in (None, *METRICS["dropped_first"]):
        if name in left:
            left.remove(name)
        if step_width + sum(_width(column) + 1 for column in left) + 2 * (TIME_WIDTH + 1) <= LINE_WIDTH:
            break
    return left


def _cell(name: str, value: float | None) -> str:
    """A value in the width of its column, with fewer digits where four do not fit; - where it was not measured."""
    width, form = _width(name), COLUMNS[name].get("form")
    if value is None:
        return "-".rjust(width)
    shown = {"rate": format_rate, "size": format_bytes, "share": "{:.0%}".format, "fine_share": "{:.1%}".format}
    texts = [shown[form](value)] if form else [format_number(value), *(f"{value:.{digits}g}" for digits in (3, 2, 1))]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)
