"""Runs the jobs of a sweep: as many at once as fit where they run, the end of one stopping no other.

waiting ─▶ running ─▶ done | failed | killed | timeout | interrupted | pruned
   ▲          └─ killed or out of memory, and tries are left: waits, twice as long each time ─┐
   └──────────────────────────────────────────────────────────────────────────────────────────┘
A change of state is on the disk before anything else happens.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from runner.device.visible import VARIABLES
from runner.signals import Interrupts
from runner.sweep.config import SweepConfig
from runner.sweep.failures import Failures
from runner.sweep.need import placed
from runner.sweep.order import Order
from runner.sweep.outcome import Ended, Told, judge
from runner.sweep.plan import JobPlan, Plan, SweepFolder, append, write_spec
from runner.sweep.record import FAILED, JobState, Record
from runner.sweep.running import POLL_S, Followed, Running
from runner.sweep.site import Handle, Site, refuse_elsewhere
from runner.sweep.watch import Watch

LOOK_S = 0.5  # between looks at the metrics of running jobs

Command = Callable[[JobPlan, bool], Sequence[str]]  # what starts a job or, where it has begun, goes on with it


class Source(Protocol):
    """Where a search's jobs come from, and who is told of them."""

    def next(self) -> JobPlan | None: ...

    def is_hopeless(self, index: int, watch: Watch) -> bool: ...

    def ended(self, index: int, state: JobState) -> None: ...


class Screen(Protocol):
    """Who is told what happens."""

    def say(self, text: str) -> None: ...

    def show(self, running: dict[int, Running]) -> None: ...


class Engine:
    """One start, or one resume, of a sweep that the caller holds."""

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        record: Record,
        options: SweepConfig,
        site: Site,
        screen: Screen,
        source: Source | None = None,
    ) -> None:
        self._source = source
        self._exhausted = source is None
        self._folder, self._plan, self._record, self._options = folder, plan, record, options
        self._site, self._screen = site, screen
        self.followed = Followed(options, screen.say)
        self._waiting: list[int] = []
        self._failures = Failures(options)
        self._interrupts = Interrupts()
        self._passed = 0  # of the signals received, those that the jobs were told
        self.stopped = ""  # why no more jobs are started

    @property
    def interrupted(self) -> int | None:
        """The first signal that came, None if there was none."""
        return self._interrupts.received[0] if self._interrupts.received else None

    def take_up(self) -> None:
        """Follow the jobs of the sweep before that go on without it, and write down how the others ended.

        Raises EnvironmentProblem where they cannot be asked after here.
        """
        left = {i: job.identity or {} for i, job in enumerate(self._record) if job.identity or job.state == "running"}
        refuse_elsewhere(left, self._options.on)
        handles = self._site.take_up(left, self._options.grace_s, self._screen.say)
        for index in left:
            if index in handles:
                self._follow(index, handles[index], "goes on, on")
            else:
                self._settle(index, -signal.SIGTERM, Told("the sweep ended"), 0.0)
        self._reap()

    def run(self, todo: Sequence[int], command: Command) -> None:
        """Run these jobs to their ends. A first SIGINT or SIGTERM stops all of them, a second kills them."""
        self._waiting = list(todo)
        looked = 0.0
        with self._interrupts.noted():
            try:
                while self.followed or ((self._waiting or not self._exhausted) and not self.stopped):
                    self._pass_on_signals()
                    self._reap()
                    self.followed.expire()
                    self._start_what_fits(command)
                    if self._may_admit():
                        self._admit()
                    if time.monotonic() - looked >= LOOK_S:
                        looked = time.monotonic()
                        self._look()
                    time.sleep(POLL_S)
            finally:
                self.followed.end()

    def _start_what_fits(self, command: Command) -> None:
        """Start jobs in their order; one that does not fit holds back those behind it that want the same devices."""
        held_back: set[str] = set()
        for index in list(self._waiting) if not self.stopped else ():
            job = self._plan.jobs[index]
            if job.need.kind in held_back or self._failures.is_resting(index):
                continue
            if not self._site.has_room(job.need):
                held_back.add(job.need.kind)
                continue
            self._waiting.remove(index)
            self._start(job, command)

    def _may_admit(self) -> bool:
        """Whether a search may propose a job now: there is room, and nothing but waits between tries wants it."""
        if self._exhausted or self.stopped or not all(map(self._failures.is_resting, self._waiting)):
            return False
        assert self._plan.search is not None
        return self._site.has_room(self._plan.search.need)

    def _admit(self) -> None:
        """Take the next job of a search, which starts at once."""
        assert self._source is not None
        job = self._source.next()
        if job is None:
            self._exhausted = True
            return
        write_spec(self._folder, self._plan, job)
        append(self._folder, self._plan, job)
        self._record.grow(len(self._plan.jobs))
        self._waiting.append(job.index)

    def _start(self, job: JobPlan, command: Command) -> None:
        """Its token is on the disk before it starts: a sweep that dies in between finds it again."""
        order = self._order(job, command)
        known = {"on": self._options.on, "token": order.token, "note": order.note}
        attempts = self._record[job.index].attempts + 1
        cleared = {"exit_code": None, "error": None, "devices": ()}
        self._record.change(job.index, state="waiting", attempts=attempts, identity=known, **cleared)
        handle = self._site.start(job.need, order)
        self._record.change(job.index, identity={**known, **handle.identity})
        self._follow(job.index, handle)

    def _order(self, job: JobPlan, command: Command) -> Order:
        run = self._folder.run(job.index)
        return Order(
            index=job.index,
            name=f"{self._folder.root.name}-{job.index:03}",
            token=secrets.token_hex(8),
            command=tuple(command(job, run.spec.is_file())),
            again=tuple(command(job, True)),
            run=str(run.root),
            log=str(self._folder.output(job.index)),
            note=str(self._folder.note(job.index)),
            place=self._plan.place,
            grace_s=self._options.grace_s,
            visible=VARIABLES.get(job.need.kind),
        )

    def _follow(self, index: int, handle: Handle, begun: str = "started on") -> None:
        self._failures.tried(index)
        self.followed[index] = Running(handle, Watch(self._folder.run(index).metrics))
        self._note_begun(index, begun)

    def _note_begun(self, index: int, begun: str = "started on") -> None:
        running, job = self.followed[index], self._plan.jobs[index]
        if running.since is not None or running.handle.seconds is None:
            return
        running.since = time.monotonic()
        self._record.change(index, state="running", devices=running.devices)
        self._screen.say(f"job {index}  {job.label}: {begun} {placed(job.need, running.devices)}")

    def _reap(self) -> None:
        for index, running in list(self.followed.items()):
            code = running.handle.poll()
            self._note_begun(index)
            if code is not None:
                self._look()  # its last lines
                del self.followed[index]
                self._settle(index, code, running.told, running.seconds, running.handle.told)

    def _settle(
        self, index: int, code: int, told: Told | None, seconds: float, known_there: Told | None = None
    ) -> None:
        """Write down how a job ended, and what follows from it."""
        ended = judge(code, told or known_there, self._folder.run(index), self._folder.output(index))
        job, total = self._plan.jobs[index], self._record[index].seconds + seconds
        known = {"exit_code": code, "error": ended.error, "identity": None, "seconds": round(total, 3)}
        again_s = None
        if ended.state in FAILED and ended.state != "timeout" and told is None and not self.stopped:
            again_s = self._failures.wait_s(index, code)
        if again_s is not None:
            self._waiting.append(index)
            self._record.change(index, state="waiting", **known)
            self._screen.say(f"job {index}  {job.label}: {ended.error}; again in {again_s:.0f} s")
            return
        self._record.change(index, state=ended.state, **known)
        if self._source is not None:
            self._source.ended(index, self._record[index])
        self._screen.say(f"job {index}  {job.label}: {_told(ended, seconds)}")
        if ended.state in FAILED and (why := self._failures.reason_to_stop()) and not self.stopped:
            self._stop(why, signal.SIGTERM)

    def _stop(self, why: str, number: int) -> None:
        """Start no more jobs, and tell the running ones to save and end."""
        self.stopped = why
        self.followed.tell_all(why, number, again=self.interrupted is not None)

    def _pass_on_signals(self) -> None:
        received = self._interrupts.received
        if len(received) == self._passed:
            return
        first = self._passed == 0
        self._passed = len(received)
        if first and not self.stopped:
            self._stop(signal.Signals(received[0]).name, received[0])
        else:
            self.followed.kill()

    def _look(self) -> None:
        for index, running in self.followed.items():
            running.watch.look()
            if self._source is not None and running.told is None and self._source.is_hopeless(index, running.watch):
                why = f"worse than the median of the others at step {running.watch.step}"
                self.followed.tell(index, Told(why, "pruned"), signal.SIGTERM)
        self._screen.show(self.followed)


def _told(ended: Ended, seconds: float) -> str:
    return f"done in {seconds:.1f} s" if ended.state == "done" else f"{ended.state}: {ended.error}"
