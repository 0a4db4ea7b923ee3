"""The screen of a sweep: a live table where it is a terminal, a line per event where it is not, and sweep.log always.

event ─┬─▶ a line (above the table)
       └─▶ sweep.log with a time stamp
look  ───▶ the table: counts, the running jobs, then the others as far as the terminal is high
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from runner.errors import StorageError
from runner.sweep.estimate import first_done, remaining_s, spoken
from runner.sweep.plan import Plan, SweepFolder, run_name, short_names
from runner.sweep.record import Record, State
from runner.tracker.text import duration, number, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from runner.sweep.running import Running
    from runner.sweep.watch import Watch

ORDER: tuple[State, ...] = ("running", "failed", "killed", "timeout", "interrupted", "done", "pruned", "waiting")
COLOURS = {"running": "cyan", "done": "green", "failed": "red", "killed": "red", "timeout": "red"}
BORDERS = 6  # lines of a terminal that the table's frame, head and count take
SMALLEST = 3  # rows


class SweepScreen:
    """Says what happens. A screen that goes away stops nothing."""

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        record: Record,
        trials: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """`trials`: how many jobs a search will have; None where all are known."""
        self._folder, self._plan, self._record, self._trials = folder, plan, record, trials
        self._stream = sys.stdout if stream is None else stream
        self._lost = False
        self._timed = any(job.state == "done" for job in record)  # or: the first job that is done tells the time to go
        self._began = time.monotonic()
        self._running: dict[int, Running] = {}
        self._watches: dict[int, Watch] = {}  # of ended jobs, too
        self._rich: Console | None = None
        self._live: Live | None = None

    def open(self) -> None:
        """Begin the live table, where there is a terminal."""
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.live import Live

            self._rich = Console(file=self._stream, force_terminal=True, highlight=False, markup=False, emoji=False)
            self._live = Live(get_renderable=self._table, console=self._rich, refresh_per_second=2)
            self._live.start()

    def close(self) -> None:
        """End the live table; may be called again."""
        live, self._live = self._live, None
        if live is not None:
            self._write(live.stop)

    def say(self, text: str) -> None:
        """A line for the user, and for sweep.log. Raises StorageError where the log cannot be written."""
        line = visible(text)
        stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
        try:
            with self._folder.log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{stamp} {line}\n")
        except OSError as error:
            raise StorageError(f"cannot write {self._folder.log}: {error.strerror}") from error
        self._write(lambda: self._print(line))

    def say_all(self, lines: Sequence[str]) -> None:
        """Several lines."""
        for line in lines:
            self.say(line)

    def show(self, running: dict[int, Running]) -> None:
        """Take in how far the running jobs are."""
        self._running = dict(running)
        self._watches |= {index: job.watch for index, job in running.items()}
        if not self._timed and (line := first_done(self._plan, self._record, running, self._trials)):
            self._timed = True
            self.say(line)

    def _print(self, line: str) -> None:
        if self._live is not None and self._rich is not None:
            self._rich.print(line, soft_wrap=True)
            return
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def _write(self, write: Any) -> None:
        if self._lost:
            return
        try:
            write()
        except OSError as error:  # a closed pipe or terminal: the jobs go on, and sweep.log has the rest
            self._lost, self._live = True, None
            self.say(f"the screen is gone ({error.strerror}); the sweep goes on")

    def _table(self) -> RenderableType:
        height = self._rich.height if self._rich is not None else 24
        seen = self._running, self._watches
        return table(self._plan, self._record, *seen, time.monotonic() - self._began, height, self._trials)


def table(
    plan: Plan,
    record: Record,
    running: dict[int, Running],
    watches: dict[int, Watch],
    elapsed_s: float,
    height: int,
    trials: int | None = None,
) -> RenderableType:
    """The live table, at most `height` lines: running jobs first, then those that failed, are done, and wait."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    axes = plan.axes
    metrics = [ranking.metric for ranking in plan.rankings] or ["train/loss"]
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1), expand=False)
    for name in ("job", *short_names(axes).values(), "state", "step", *metrics, "time", "device", "folder"):
        grid.add_column(name, no_wrap=True)
    order = sorted(range(len(plan.jobs)), key=lambda i: (ORDER.index(record[i].state), i))
    room = max(height - BORDERS, SMALLEST)
    for index in order[:room]:
        state = record[index]
        cells = [str(index), *(visible(plan.jobs[index].varied.get(axis, "")) for axis in axes), state.state]
        grid.add_row(
            *cells,
            *_progress(plan, record, index, running.get(index), watches.get(index), metrics),
            style=COLOURS.get(state.state),
        )
    hidden = len(order) - room
    counts = " · ".join(f"{count} {state}" for state, count in record.count().items())
    left = remaining_s(plan, record, running, trials)
    clock = f"{duration(elapsed_s)}" + (f" · about {spoken(left)} to go" if left is not None else "")
    more = Text(f"  and {hidden} more" if hidden > 0 else "")
    return Group(grid, more, Text(f"  {counts} · {clock}"))


def _progress(
    plan: Plan, record: Record, index: int, running: Running | None, watch: Watch | None, metrics: Sequence[str]
) -> list[str]:
    """Step, metrics, time, device and folder (in the sweep's own) of a job."""
    state = record[index]
    seconds = state.seconds + (running.seconds if running else 0.0)
    values = [watch.values.get(metric) if watch else None for metric in metrics]
    return [
        f"{watch.step}/{plan.data(plan.jobs[index]).get('steps', '?')}" if watch else "",
        *("" if value is None else number(value) for value in values),
        duration(seconds) if seconds else "",
        ",".join(running.devices if running else state.devices),
        run_name(index) if state.attempts else "",
    ]
