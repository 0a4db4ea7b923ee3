"""The screen: live where it is a terminal, plain lines where it is not, and run.log in any case.

step, sample ─▶ Progress ─┬─▶ live panel, redrawn by a thread of its own   (terminal)
                          └─▶ LogTable: a row now and then                 (pipe, file; and always run.log)
message ─────────────────▶ above the panel, or a line                      and run.log with a time stamp
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TextIO

from runner.core.errors import RunnerError, StorageError
from runner.run_dir.manifest import redact
from runner.tracker.log_table import LogTable, sample_lines
from runner.tracker.screen import Progress, render_panel, sample_line
from runner.tracker.text import escape_for_terminal

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live

LINE_EVERY_S = 5.0
REDRAWS_PER_S = 4
WIDEST = 100  # columns of the panel
COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


class Console:
    """What a run says. One per process; every method may be called from any thread.

    A screen that goes away (a closed pipe or terminal) is noted in run.log and does not stop the run;
    a log that cannot be written raises StorageError.
    """

    def __init__(self, log_path: Path, stream: TextIO | None = None) -> None:
        self._log_path = log_path
        self._stream = sys.stdout if stream is None else stream
        self._live_wanted = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        # Guards Progress only, and is never held while rich writes: rich's own thread has its lock and wants this one.
        self._lock = RLock()
        self._progress: Progress | None = None
        self._table = LogTable()
        self._live: Live | None = None
        self._rich: RichConsole | None = None
        self._last_line = -LINE_EVERY_S
        self._screen_lost = False

    def start(self, title: Mapping[str, Any], steps: int) -> None:
        """Begin to show a run of `steps` steps; `title` is e.g. name, device, seed, folder."""
        self.message(" · ".join(str(v) if k in ("name", "folder") else f"{k} {v}" for k, v in title.items()))
        self._progress, self._table = Progress(title, steps), LogTable()
        self.show(self._panel)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a finished step; a row follows at the first, the last, each evaluation, and about every 5 s."""
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
        """Show a sample as the last one; its text cannot steer the terminal."""
        line = redact(sample_line(row))
        if self._progress is not None:
            self._progress.last_sample = line
        self._write_log(sample_lines(line))

    def message(self, text: str, level: str = "info") -> None:
        """Say something, on the screen and in run.log."""
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
        """Keep what `draw` returns, called by a thread of rich, below all lines until `stop`; on a terminal only."""
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
        """Write to run.log, and to the screen where it has no live panel."""
        for line in lines:
            self._write(line, on_screen=self._live is None)

    def _write(self, text: str, level: str = "info", *, head: str | None = None, on_screen: bool = True) -> None:
        line = escape_for_terminal(text)
        self._log(line, level)
        if on_screen:
            prefix = f"{level}: " if level != "info" else ""
            self._on_screen(lambda: self._print((prefix if head is None else head) + line, COLOURS.get(level, "")))

    def _print(self, line: str, style: str) -> None:
        if self._live is not None and self._rich is not None:
            from rich.text import Text

            self._rich.print(Text(line, style), soft_wrap=True)
            return
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def _on_screen(self, write: Any) -> None:
        """Run `write` unless the screen is gone; note when it goes."""
        if self._screen_lost:
            return
        try:
            write()
        except OSError as error:
            self._screen_lost, self._live = True, None
            self._log(f"the screen is gone ({error.strerror}); the work continues", "warning")

    def _log(self, line: str, level: str) -> None:
        stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
        try:
            with self._log_path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{stamp} {level:7} {line}\n")
        except OSError as error:
            raise StorageError(f"cannot write {self._log_path}: {error.strerror}") from error
