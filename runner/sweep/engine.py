"""Runs the jobs of a sweep: as many at once as fit, each in a process of its own, whose end stops no other.

waiting ─▶ running ─▶ done | failed | killed | timeout | interrupted
   ▲          └─ killed or out of memory, and tries are left: waits, twice as long each time ─┐
   └──────────────────────────────────────────────────────────────────────────────────────────┘
A change of state is on the disk before anything else happens.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runner.errors import OutOfMemory
from runner.sweep.config import SweepConfig
from runner.sweep.interrupts import Interrupts
from runner.sweep.outcome import Ended, Told, judge
from runner.sweep.plan import JobPlan, Plan, SweepFolder, append, write_spec
from runner.sweep.process import JobProcess, end_orphan
from runner.sweep.record import FAILED, JobState, Record
from runner.sweep.results import value_of
from runner.sweep.slots import Slots, environment
from runner.sweep.watch import Watch

POLL_S = 0.05
LOOK_S = 0.5  # between looks at the metrics of running jobs
FIRST_RETRY_S = 10.0
RETRIED = (OutOfMemory.exit_code,)  # and whatever a signal ended that was not ours

Command = Callable[[JobPlan], Sequence[str]]  # what starts a job, or goes on with it


class Source(Protocol):
    """Where a search's jobs come from, and who is told of them."""

    def next(self) -> JobPlan | None: ...

    def is_hopeless(self, index: int, watch: Watch) -> bool: ...

    def ended(self, index: int, state: JobState, value: float | None) -> None: ...


class Screen(Protocol):
    """Who is told what happens."""

    def say(self, text: str) -> None: ...

    def show(self, running: dict[int, Running]) -> None: ...


@dataclass(slots=True)
class Running:
    """A job while it runs. `deadline`: when it is killed for not having stopped as it was told."""

    process: JobProcess
    devices: tuple[str, ...]
    watch: Watch
    began: float = field(default_factory=time.monotonic)
    told: Told | None = None
    deadline: float = float("inf")


class Engine:
    """One start, or one resume, of a sweep that the caller holds."""

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        record: Record,
        options: SweepConfig,
        slots: Slots,
        screen: Screen,
        source: Source | None = None,
    ) -> None:
        self._source = source
        self._exhausted = source is None
        self._folder, self._plan, self._record, self._options = folder, plan, record, options
        self._slots, self._screen = slots, screen
        self._running: dict[int, Running] = {}
        self._waiting: list[int] = []
        self._not_before: dict[int, float] = {}
        self._tries: dict[int, int] = {}
        self._failures = 0
        self._interrupts = Interrupts()
        self._passed = 0  # of the signals received, those that the jobs were told
        self.stopped = ""  # why no more jobs are started

    @property
    def interrupted(self) -> int | None:
        """The first signal that came, None if there was none."""
        return self._interrupts.received[0] if self._interrupts.received else None

    def run(self, todo: Sequence[int], command: Command) -> None:
        """Run these jobs to their ends. A first SIGINT or SIGTERM stops all of them, a second kills them."""
        self._waiting = list(todo)
        looked = 0.0
        with self._interrupts.noted():
            try:
                while self._running or ((self._waiting or not self._exhausted) and not self.stopped):
                    self._pass_on_signals()
                    self._reap()
                    self._expire()
                    self._start_what_fits(command)
                    if self._has_room_for_more():
                        self._admit()
                    if time.monotonic() - looked >= LOOK_S:
                        looked = time.monotonic()
                        self._look()
                    time.sleep(POLL_S)
            finally:
                self._end_all()

    def _start_what_fits(self, command: Command) -> None:
        """Start jobs in their order; one that does not fit holds back those behind it that want the same devices."""
        held_back: set[str] = set()
        for index in list(self._waiting) if not self.stopped else ():
            job = self._plan.jobs[index]
            if job.need.kind in held_back or self._not_before.get(index, 0.0) > time.monotonic():
                continue
            devices = self._slots.acquire(job.need)
            if devices is None:
                held_back.add(job.need.kind)
                continue
            self._waiting.remove(index)
            self._start(job, devices, command(job))

    def _has_room_for_more(self) -> bool:
        """Whether a search may propose a job now: a slot is free, and nothing but waits between tries wants it."""
        now = time.monotonic()
        resting = all(self._not_before.get(index, 0.0) > now for index in self._waiting)
        return not self._exhausted and not self.stopped and resting and self._slots.is_free()

    def _admit(self) -> None:
        """Take the next job of a search, which starts at once: a slot is free."""
        assert self._source is not None
        job = self._source.next()
        if job is None:
            self._exhausted = True
            return
        write_spec(self._folder, self._plan, job)
        append(self._folder, self._plan, job)
        self._record.grow(len(self._plan.jobs))
        self._waiting.append(job.index)

    def _start(self, job: JobPlan, devices: tuple[str, ...], command: Sequence[str]) -> None:
        index = job.index
        cores = devices if job.need.kind == "core" else ()
        log, shown_cards = self._folder.output(index), environment(job.need, devices)
        process = JobProcess(command, log, shown_cards, cores, self._plan.place)
        self._running[index] = Running(process, devices, Watch(self._folder.run(index).metrics))
        self._tries[index] = self._tries.get(index, 0) + 1
        attempts = self._record[index].attempts + 1
        cleared = {"exit_code": None, "error": None, "process": process.identity, "devices": devices}
        self._record.change(index, state="running", attempts=attempts, **cleared)
        self._screen.say(f"job {index}  {job.label}: started on {job.need.kind} {','.join(devices)}")

    def _reap(self) -> None:
        for index, running in list(self._running.items()):
            code = running.process.poll()
            if code is not None:
                self._look()  # its last lines
                del self._running[index]
                self._slots.release(self._plan.jobs[index].need, running.devices)
                self._settle(index, running, code)

    def _settle(self, index: int, running: Running, code: int) -> None:
        """Write down how a job ended, and what follows from it."""
        seconds = time.monotonic() - running.began
        ended = judge(code, running.told, self._folder.run(index), self._folder.output(index))
        job, total = self._plan.jobs[index], self._record[index].seconds + seconds
        known = {"exit_code": code, "error": ended.error, "process": None, "seconds": round(total, 3)}
        if ended.state in FAILED and self._may_retry(index, code, running):
            wait_s = (self._options.retry_wait_s or FIRST_RETRY_S) * 2 ** (self._tries[index] - 1)
            self._not_before[index] = time.monotonic() + wait_s
            self._waiting.append(index)
            self._record.change(index, state="waiting", **known)
            self._screen.say(f"job {index}  {job.label}: {ended.error}; again in {wait_s:.0f} s")
            return
        self._record.change(index, state=ended.state, **known)
        if self._source is not None:
            self._source.ended(index, self._record[index], value_of(self._folder, self._plan, index))
        self._screen.say(f"job {index}  {job.label}: {_told(ended, seconds)}")
        if ended.state in FAILED:
            self._count_failure()

    def _may_retry(self, index: int, code: int, running: Running) -> bool:
        again = self._tries[index] <= self._options.retries and not self.stopped and running.told is None
        return again and (code in RETRIED or code < 0)

    def _count_failure(self) -> None:
        self._failures += 1
        most = 1 if self._options.fail_fast else self._options.max_failures
        if most is not None and self._failures >= most and not self.stopped:
            option = "sweep.fail_fast" if self._options.fail_fast else f"sweep.max_failures={most}"
            self._stop(f"stopped by {option}", signal.SIGTERM)

    def _stop(self, why: str, number: int) -> None:
        """Start no more jobs, and tell the running ones to save and end."""
        self.stopped = why
        if count := len(self._running):
            jobs = f"{count} job{'s' if count > 1 else ''}"
            within = f"within {self._options.grace_s:.0f} s (Ctrl-C{' again' if self.interrupted else ''} kills them)"
            self._screen.say(f"{why}: {jobs} told to save and end, {within}")
        for running in self._running.values():
            self._tell(running, Told(why), number)

    def _tell(self, running: Running, told: Told, number: int) -> None:
        if running.told is None:
            running.told, running.deadline = told, time.monotonic() + self._options.grace_s
            running.process.signal(number)

    def _expire(self) -> None:
        """Stop jobs that take too long, and kill those that were told to stop and did not."""
        now, limit = time.monotonic(), self._options.timeout_s
        for index, running in self._running.items():
            if limit is not None and running.told is None and now - running.began > limit:
                why = f"not done after {limit:g} s (sweep.timeout_s)"
                self._tell(running, Told(why, "timeout"), signal.SIGTERM)
            elif now > running.deadline:
                running.deadline = float("inf")
                self._screen.say(f"job {index}  did not end within {self._options.grace_s:g} s: killed")
                running.process.signal(signal.SIGKILL)

    def _pass_on_signals(self) -> None:
        received = self._interrupts.received
        if len(received) == self._passed:
            return
        first = self._passed == 0
        self._passed = len(received)
        if first and not self.stopped:
            self._stop(signal.Signals(received[0]).name, received[0])
        else:
            for running in self._running.values():
                running.process.signal(signal.SIGKILL)

    def _look(self) -> None:
        for index, running in self._running.items():
            running.watch.look()
            if self._source is not None and running.told is None and self._source.is_hopeless(index, running.watch):
                why = f"worse than the median of the others at step {running.watch.step}"
                self._tell(running, Told(why, "pruned"), signal.SIGTERM)
        self._screen.show(self._running)

    def _end_all(self) -> None:
        """No job outlives the sweep: those still running when an error ends it save first, if they can in time."""
        end = time.monotonic() + self._options.grace_s
        for running in self._running.values():
            running.process.signal(signal.SIGTERM)
        for running in self._running.values():
            while running.process.poll() is None and time.monotonic() < end:
                time.sleep(POLL_S)
            running.process.signal(signal.SIGKILL)
            running.process.wait()


def _told(ended: Ended, seconds: float) -> str:
    return f"done in {seconds:.1f} s" if ended.state == "done" else f"{ended.state}: {ended.error}"


def end_orphans(folder: SweepFolder, plan: Plan, record: Record, grace_s: float, say: Callable[[str], None]) -> None:
    """Wait for jobs that outlived their sweep (they save, and end), then kill them; mark them as not finished."""
    left = {i: job.process for i, job in enumerate(record) if job.state == "running" and job.process is not None}
    deadline, told = time.monotonic() + grace_s, False
    while left := {i: p for i, p in left.items() if end_orphan(p, signal.SIGKILL if _late(deadline) else 0)}:
        if not told:
            say(f"waiting for job {', '.join(map(str, left))} of the sweep before, which is saving")
            told = True
        time.sleep(POLL_S)
    for index, job in enumerate(record):
        if job.state == "running":
            ended = judge(-signal.SIGTERM, Told("the sweep ended"), folder.run(index), folder.output(index))
            record.change(index, state=ended.state, process=None, error=ended.error)


def _late(deadline: float) -> bool:
    return time.monotonic() > deadline
