"""The progress of a running sweep: the screen, sweep.log, and the remaining time.

message ─┬─▶ a line (above the table)
         └─▶ sweep.log with a time stamp
show ─────▶ the table, if the screen is a terminal: running jobs, then the others as far as they fit, and counts

The time is estimated from runs that have ended: before a sweep, from an earlier run in outputs/ on this machine that
differs only in what varies, its name and its trackers; later, from finished jobs and the pace of running ones.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from runner.run_dir.folder import OUTPUTS, RunFolder, display_path
from runner.spec.base import iter_leaves
from runner.spec.job import CONFIG_DIR
from runner.spec.saved_spec import KEY
from runner.sweep.job import State, read_if_whole
from runner.sweep.plan import Plan, SweepFolder, SweepState, run_name, short_names
from runner.tracker.console import Console
from runner.tracker.text import escape_for_terminal, format_duration, format_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from runner.sweep.results import MetricsTail
    from runner.sweep.scheduler import RunningJob

ORDER: tuple[State, ...] = ("running", "failed", "killed", "timeout", "interrupted", "done", "pruned", "waiting")
COLORS = {"running": "cyan", "done": "green", "failed": "red", "killed": "red", "timeout": "red"}
BORDERS = 6  # lines of a terminal that the table's frame, head and count take
SMALLEST = 3  # rows
MOST_READ = 30  # number of newest runs in outputs/ that are read
FAR = 4  # largest ratio of the numbers of steps: beyond, start and end of a run distort the estimate
SAME_TIME = ("name", "seed", "tracker", "watch", "strict", "chat.date", KEY)  # they do not change a run's duration
STAGE = re.compile(r".*/stages/([^/]+)/[0-9a-f]+(?:/export)?")
RECIPE = "recipe"


class SweepScreen:
    """Prints messages and shows the table. A closed screen stops nothing."""

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        record: SweepState,
        trials: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """trials: number of jobs of a search; None if all are known."""
        self._plan, self._record, self._trials = plan, record, trials
        self._console = Console(folder.log, stream)
        # Otherwise the first finished job prints the remaining time.
        self._timed = any(job.state == "done" for job in record)
        self._began = time.monotonic()
        self._running: dict[int, RunningJob] = {}
        self._tails: dict[int, MetricsTail] = {}  # of ended jobs, too

    def __enter__(self) -> Self:
        """Start the live table on a terminal."""
        self._console.show(lambda rich: self.table(rich.height))
        return self

    def __exit__(self, *_: object) -> None:
        """End the live table."""
        self._console.stop([])

    def say(self, *lines: str) -> None:
        """Print lines and write them to sweep.log. Raises StorageError if the log cannot be written."""
        for line in lines:
            self._console.message(escape_for_terminal(line))

    def show(self, running: dict[int, RunningJob]) -> None:
        """Update the running jobs."""
        self._running = dict(running)
        self._tails |= {index: job.metrics for index, job in running.items()}
        if not self._timed and (line := first_done_line(self._plan, self._record, running, self._trials)):
            self._timed = True
            self.say(line)

    def table(self, height: int) -> RenderableType:
        """The live table, at most `height` lines: running, failed, finished and waiting jobs."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        plan, record = self._plan, self._record
        metrics = [ranking.metric for ranking in plan.rankings] or ["train/loss"]
        grid = Table(box=SIMPLE_HEAD, padding=(0, 1), expand=False)
        for name in ("job", *short_names(plan.axes).values(), "state", "step", *metrics, "time", "device", "folder"):
            grid.add_column(name, no_wrap=True)
        order = sorted(range(len(plan.jobs)), key=lambda i: (ORDER.index(record[i].state), i))
        room = max(height - BORDERS, SMALLEST)
        for index in order[:room]:
            job, state = plan.jobs[index], record[index]
            running, tail = self._running.get(index), self._tails.get(index)
            seconds = state.seconds + (running.seconds if running else 0.0)
            values = [tail.values.get(metric) if tail else None for metric in metrics]
            grid.add_row(
                str(index),
                *(escape_for_terminal(job.varied.get(axis, "")) for axis in plan.axes),
                state.state,
                f"{tail.step}/{planned_steps(plan.data(job))}" if tail else "",
                *("" if value is None else format_number(value) for value in values),
                format_duration(seconds) if seconds else "",
                ",".join(running.job.devices if running else state.devices),
                run_name(index) if state.attempts else "",
                style=COLORS.get(state.state),
            )
        more = f"  and {len(order) - room} more" if len(order) > room else ""
        counts = " · ".join(f"{count} {state}" for state, count in record.count_states().items())
        left = remaining_s(plan, record, self._running, self._trials)
        clock = format_duration(time.monotonic() - self._began)
        to_go = "" if left is None else f" · about {duration_words(left)} left"
        return Group(grid, Text(more), Text(f"  {counts} · {clock}{to_go}"))


@dataclass(frozen=True, slots=True)
class StepPace:
    """Seconds per step, including start and end of the run, and the run they were measured on."""

    seconds: float
    steps: int
    source: str


def estimated_time(plan: Plan, trials: int | None, parallel: int) -> str:
    """For a plan: the estimated duration and its source, or that it is unknown."""
    found = find_earlier_run(plan)
    if found is None:
        return "known after the first job"
    steps = [_steps(plan, job.sections) for job in plan.jobs] or [_steps(plan, {})] * (trials or 0)
    total = duration_words(_in_parallel([found.seconds * count for count in steps], parallel))
    at_most = "at most " if plan.options.get("prune") else ""
    earlier = f"{found.source} took {duration_words(found.seconds * found.steps)} for {found.steps} steps"
    return f"{at_most}about {total}; {earlier}"


def find_earlier_run(plan: Plan, outputs: Path = OUTPUTS) -> StepPace | None:
    """The pace of the newest run that differs from this sweep's jobs only in what varies."""
    axes = plan.axes
    if RECIPE in axes or "epochs" in axes or plan.base.get("epochs"):
        return None  # common options, or the number of steps, are not known by keys
    ignored = {*SAME_TIME, *axes, "steps"}
    wanted = _comparable(plan.base, ignored)
    most = max((_steps(plan, job.sections) for job in plan.jobs), default=_steps(plan, {}))
    specs = [path for pattern in ("[0-9]*/*/spec.yaml", "sweeps/*/*/spec.yaml") for path in outputs.glob(pattern)]
    timed = sorted(((path.stat().st_mtime, path) for path in specs if not path.parent.is_symlink()), reverse=True)
    for _, path in timed[:MOST_READ]:
        run, spec = RunFolder(path.parent), read_if_whole(path)  # empty if it cannot be read
        seconds = _seconds(run)
        if seconds is not None and _comparable(spec, ignored) == wanted:
            steps = max(int(spec.get("steps", 1)), 1)
            if most <= steps * FAR and steps <= most * FAR:
                return StepPace(seconds / steps, steps, display_path(run.root))
    return None


def remaining_s(
    plan: Plan, record: SweepState, running: Mapping[int, RunningJob], trials: int | None = None
) -> float | None:
    """Estimate the remaining seconds, including the `trials` that a search will propose.

    Uses the pace of running jobs, or of finished jobs before those have made steps. None where there are neither.
    """
    left = {
        job.index: _steps(plan, job.sections) - (running[job.index].metrics.step if job.index in running else 0)
        for job in plan.jobs
        if record[job.index].state in ("running", "waiting")
    }
    to_go = [*left.values(), *[_steps(plan, {})] * max((trials or 0) - len(plan.jobs), 0)]
    pace = sum(job.pace for job in running.values())
    if pace > 0:
        return sum(to_go) / pace
    each = _of_done(plan, record)
    if each is None or not to_go:
        return None
    return _in_parallel([count * each for count in to_go], max(len(running), 1))


def first_done_line(
    plan: Plan, record: SweepState, running: Mapping[int, RunningJob], trials: int | None = None
) -> str:
    """The line for the moment when the first job is done; empty before, and if no job is left."""
    left, each = remaining_s(plan, record, running, trials), _of_done(plan, record)
    if left is None or each is None or left < 1:
        return ""
    [first, *_] = [job for job in plan.jobs if record[job.index].state == "done"]
    took = duration_words(record[first.index].seconds)
    return f"time     about {duration_words(left)} left: job {first.index} took {took}"


def duration_words(seconds: float) -> str:
    """40 s, 12 min, 3 h 20 min, 2 d 4 h."""
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= size:
            rest = int(seconds % size / part)
            return f"{int(seconds / size)} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{math.ceil(seconds)} s"


def _in_parallel(seconds: Sequence[float], parallel: int) -> float:
    """Total duration of jobs that start in this order whenever one of `parallel` slots is free."""
    places = [0.0] * max(min(parallel, len(seconds)), 1)
    for each in seconds:
        places[places.index(min(places))] += each
    return max(places)


def _of_done(plan: Plan, record: SweepState) -> float | None:
    """Seconds per step of the finished jobs of this sweep."""
    done = [job for job in plan.jobs if record[job.index].state == "done"]
    steps = sum(_steps(plan, job.sections) for job in done)
    seconds = sum(record[job.index].seconds for job in done)
    return seconds / steps if steps and seconds else None


def planned_steps(data: Mapping[str, Any]) -> str:
    """The steps of a job by its config; ? if they follow from epochs and data."""
    return "?" if data.get("epochs") else str(data.get("steps", "?"))


def _steps(plan: Plan, sections: Mapping[str, Any]) -> int:
    return int(sections.get("steps", plan.base.get("steps", 0)))


def _seconds(run: RunFolder) -> float | None:
    """Duration of a run that finished at its first attempt: from writing its spec to its last status."""
    status, host = read_if_whole(run.status), read_if_whole(run.manifest).get("platform", {}).get("host")
    if status.get("state") != "done" or status.get("attempt") != 1 or host != socket.gethostname():
        return None
    return run.status.stat().st_mtime - run.spec.stat().st_mtime


def _comparable(spec: Mapping[str, Any], ignored: set[str]) -> dict[str, Any]:
    """The values of a spec that determine its duration; upstream runs are named by their recipes."""
    kept = {}
    for key, value in iter_leaves(spec):
        parts = key.split(".")
        if not any(".".join(parts[: i + 1]) in ignored for i in range(len(parts))):
            kept[key] = _as_typed(value)
    return kept


def _as_typed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = value.partition(CONFIG_DIR)[0]
    stage = STAGE.fullmatch(value)
    return f"recipe:{stage[1]}" if stage else os.path.realpath(value) if os.path.exists(value) else value
