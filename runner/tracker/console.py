"""The screen: a live panel on a terminal, plain lines elsewhere; and always run.log.

step, sample ─▶ Progress ─┬─▶ live panel, redrawn by its own thread        (terminal)
                          └─▶ LogTable: a row every few seconds            (pipe, file; and always run.log)
message ─────────────────▶ above the panel, or a line                      and run.log with a time stamp

The table has a header every 50 rows, the columns of METRICS["columns"] that the run measures, and lines below a row for
evaluations and samples.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TextIO

from runner.core.errors import RunnerError
from runner.core.fsync_io import format_bytes, storage_errors
from runner.run_dir.manifest import redact
from runner.spec.evaluation import HIGH, LOW, without_bounds
from runner.tracker.text import (
    METRICS,
    Progress,
    discard_output,
    escape_for_terminal,
    format_duration,
    format_number,
    format_rate,
    labeled_line,
    render_panel,
    sample_line,
)

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live

COLUMNS: dict[str, dict[str, Any]] = METRICS["columns"]
LINE_WIDTH = 82  # with the time stamp and the level in run.log: 120
HEADER_EVERY = 50  # rows
TIME_WIDTH = 8  # of 12d04:05
LINE_EVERY_S = 5.0
REDRAWS_PER_S = 4
WIDEST = 100  # columns of the panel
COLORS = {"warning": "yellow", "error": "red", "critical": "red"}


class Console:
    """The messages and progress of a run. One per process; every method may be called from any thread.

    A closed screen (pipe or terminal) is recorded in run.log and does not stop the run; a log that cannot be written
    raises StorageError.
    """

    def __init__(self, log_path: Path, stream: TextIO | None = None) -> None:
        self._log_path = log_path
        self._stream = sys.stdout if stream is None else stream
        self._live_wanted = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        # Guards Progress only, and is not held while rich writes: rich's thread holds its own lock and needs this one.
        self._lock = RLock()
        self._progress: Progress | None = None
        self._table = LogTable()
        self._live: Live | None = None
        self._rich: RichConsole | None = None
        self._last_line = -LINE_EVERY_S
        self._screen_lost = False

    def start(self, title: Mapping[str, Any], steps: int) -> None:
        """Start the display of a run with `steps` steps; title: e.g. name, device, seed, folder."""
        bare = ("name", "folder", "parameters")
        self.message(" · ".join(str(v) if k in bare else f"{k} {v}" for k, v in title.items()))
        self._progress, self._table = Progress(title, steps), LogTable()
        self.show(self._panel)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update a finished step; writes a row for the first, the last, each evaluation, and about every 5 s."""
        progress, now = self._progress, time.monotonic()
        if progress is None:
            raise RunnerError("Console.start comes before Console.step")
        with self._lock:
            progress.update(step, metrics, now)
        due = now - self._last_line >= LINE_EVERY_S
        if due or step == progress.steps or any(name.startswith("eval/") for name in metrics):
            self._last_line = now
            self._write_log(self._table.lines(progress, now))

    def sample(self, row: Mapping[str, Any]) -> None:
        """Show a sample; its control characters are escaped."""
        line = redact(sample_line(row))
        if self._progress is not None:
            self._progress.last_sample = line
        self._write_log(sample_lines(line))

    def message(self, text: str, level: str = "info") -> None:
        """Write a message to the screen and to run.log."""
        first, *more = redact(text).splitlines() or [""]
        self._write(first, level)
        for line in more:
            self._write(line, level, head="")

    def stop(self, summary_lines: Sequence[str]) -> None:
        """End the live screen and print the last lines; may be called again."""
        live, self._live = self._live, None
        if live is not None:
            self._on_screen(live.stop)
        self._progress = None
        for line in summary_lines:
            self.message(line)

    def show(self, draw: Callable[[RichConsole], Any]) -> None:
        """Draw what `draw` returns below all lines until `stop`, in a thread of rich; on a terminal only."""
        if not self._live_wanted:
            return
        from rich.console import Console as RichConsole
        from rich.live import Live

        rich = RichConsole(file=self._stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        live = Live(get_renderable=lambda: draw(rich), console=rich, refresh_per_second=REDRAWS_PER_S)
        self._rich, self._live = rich, live
        self._on_screen(lambda: live.start(refresh=True))

    def _panel(self, rich: RichConsole) -> Any:
        progress = self._progress
        if progress is None:
            return ""
        with self._lock:
            return render_panel(progress, time.monotonic(), min(rich.width, WIDEST))

    def _write_log(self, lines: Sequence[str]) -> None:
        """Write to run.log, and to the screen if it has no live panel."""
        for line in lines:
            self._write(line, on_screen=self._live is None)

    def _write(self, text: str, level: str = "info", *, head: str | None = None, on_screen: bool = True) -> None:
        line = escape_for_terminal(text)
        self._log(line, level)
        if on_screen:
            prefix = f"{level}: " if level != "info" else ""
            self._on_screen(lambda: self._print((prefix if head is None else head) + line, COLORS.get(level, "")))

    def _print(self, line: str, style: str) -> None:
        if self._live is not None and self._rich is not None:
            from rich.text import Text

            self._rich.print(Text(line, style), soft_wrap=True)
            return
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def _on_screen(self, write: Any) -> None:
        """Run `write` unless the screen is closed; record when it closes."""
        if self._screen_lost:
            return
        try:
            write()
        except OSError as error:
            self._screen_lost, self._live = True, None
            discard_output(self._stream)
            self._log(f"the terminal closed ({error.strerror}); the run continues", "warning")

    def _log(self, line: str, level: str) -> None:
        stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
        with (
            storage_errors(f"cannot write {self._log_path}"),
            self._log_path.open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{stamp} {level:7} {line}\n")


@dataclass(slots=True)
class LogTable:
    """The rows of one run; columns are chosen at its first row, and again when a new metric appears."""

    _columns: list[str] = field(default_factory=list)
    _rows: int = 0  # since the last header

    def lines(self, progress: Progress, now: float) -> list[str]:
        """The last step's row, with a header before it if due, and held-out values after it."""
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
        seconds = (now - progress.begin, progress.remaining_s())
        times = [format_duration(each).replace(" ", "") for each in seconds]
        step = f"{progress.step}/{progress.steps}".rjust(_step_width(progress))
        return " ".join([step, *cells, *(time.rjust(TIME_WIDTH) for time in times)])


def eval_lines(step: int, metrics: Mapping[str, float]) -> list[str]:
    """The held-out values of a step as `name=value`, intervals in brackets; none without values."""
    names = [name for name in without_bounds(metrics) if name.startswith("eval/")]
    pairs = [f"{name}={interval_text(name, metrics, '')}" for name in names]
    return _wrap_text("eval", " ".join([f"step={step}", *pairs])) if pairs else []


def interval_text(name: str, metrics: Mapping[str, float], gap: str = " ") -> str:
    """0.52 (0.49..0.55), with bounds if there are any; empty if it was not measured."""
    if name not in metrics:
        return ""
    low, high = metrics.get(name + LOW), metrics.get(name + HIGH)
    bounds = "" if low is None or high is None else f"{gap}({format_number(low)}..{format_number(high)})"
    return f"{format_number(metrics[name])}{bounds}"


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
    """A value in the width of its column, with fewer digits if four do not fit; - if not measured."""
    width, form = _width(name), COLUMNS[name].get("form")
    if value is None:
        return "-".rjust(width)
    shown = {"rate": format_rate, "size": format_bytes, "share": "{:.0%}".format, "fine_share": "{:.1%}".format}
    texts = [shown[form](value)] if form else [format_number(value), *(f"{value:.{digits}g}" for digits in (3, 2, 1))]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)
