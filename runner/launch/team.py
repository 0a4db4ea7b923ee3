"""The processes of a job that one launcher has started: begun together, watched, and ended together.

start ─▶ all ranks end well                             ─▶ done: what serves them is told to end
      ├▶ a rank ends otherwise ─▶ the others have 5 s   ─▶ its error, once
      ├▶ a rank is silent, or waited for too long       ─▶ every rank's stacks, who lags, the end
      ├▶ a sampler is lost                              ─▶ the same again, so many times; its work is asked again
      └▶ SIGINT, SIGTERM, passed on to each rank once   ─▶ they save together; again: they end at once
      └▶ SIGUSR1, passed on to each rank                ─▶ they save together, and continue
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from runner.core.signals import SAVE, Interrupts
from runner.launch.machines import Machines, deadline_s
from runner.launch.member import Order, Process, Roster, Starter, dump_stacks
from runner.launch.session import called
from runner.launch.stage import is_stage
from runner.launch.verdict import INTERRUPTED, KILLED, LAGGED, LASTING, LOST, OWN, WAITED, Verdict, judge, lagging
from runner.run_dir.folder import RunFolder, shown
from runner.sampler.remote.wire import TOKEN
from runner.spec.job import JobSpec
from runner.tracker.console import Console

POLL_S = 0.05
GRACE_S = 5.0  # for processes to end by themselves once a rank has ended
CAUSE_S = 3.0  # for a cause to be heard of where ranks say that they waited in vain
SHOW_CURSOR = "\x1b[?25h"
SILENT = 1 / 3  # of sampler.timeout_s at most: then there is time left to start another one, and for that one to answer
SILENT_S = 300.0  # at most: as long as a library may be read from a slow disk, when no other thread can speak
REPLACEMENTS = 3  # where launch.replacements says nothing
NOTES = "*.json"  # in the folders of their logs: where each is reached


@dataclass(slots=True)
class Team:
    """The ranks and samplers that `starter` starts, in attempt `attempt` at a job."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    starter: Starter
    machines: Machines | None = None
    members: list[Process] = field(default_factory=list)  # the ranks
    services: Services = field(init=False)
    roster: Roster = field(init=False)
    interrupts: Interrupts = field(default_factory=lambda: Interrupts(saves=True))
    noticed: int = 0  # signals that came, and are dealt with
    passed_on: int = 0  # those of them that ask the ranks to end
    deadline: float = float("inf")  # when ranks that still run are killed
    waited_since: float = 0.0  # when the first rank was heard to have waited in vain; 0: none was
    hung: Verdict | None = None

    def __post_init__(self) -> None:
        shared = {TOKEN: secrets.token_urlsafe(32)} if self.spec.launch.samplers else {}
        say = Console(self.folder.log).message
        self.roster = Roster(self.folder, self.attempt, self.spec.launch.machine)
        self.services = Services(self.spec, self.folder, self.attempt, self.starter, shared, say)

    def run(self) -> None:
        """Run to the end. Raises the error of the process that is the cause where it does not end well."""
        with self.interrupts.noted():
            try:
                self._start()
                while self._look():
                    self._list()
                    time.sleep(POLL_S)
            finally:
                self._end()
                self._list(over=True)
        verdict = self.hung or self._judged(self.members)
        if self.machines is not None:
            verdict = self.machines.agree(verdict)
        if verdict is not None:
            raise self._with_way_on(verdict).error(stopped=bool(self.interrupts.received))

    def _start(self) -> None:
        self.folder.ranks.mkdir(exist_ok=True)
        meeting, secret = self.starter.meeting(), self.services.environment
        for place in self.starter.places():
            order = Order(
                role="rank",
                index=place.rank,
                folder=self.folder.of_rank(place.rank),
                attempt=self.attempt,
                cards=(place.local_rank,),
                environment={**environment(meeting), **(secret if place.leads else {}), **place.variables()},
                place=place,
                meets=place.leads and place.size > 1,
            )
            self.members.append(self.starter.start(order))
        self.services.start()

    def _list(self, *, over: bool = False) -> None:
        """Have it written who takes part."""
        self.roster.note([*self.members, *self.services.members], self.services.replaced, over=over)

    def _look(self) -> bool:
        """Take in what has happened; whether a rank still runs."""
        running = [member for member in self.members if member.runs()]
        for member in running:
            member.ear.listen()
        self._pass_on(running)
        if time.monotonic() > self.deadline:
            for member in running:
                member.kill()
        elif self._is_over():
            self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
        elif running and self.deadline == float("inf"):  # else nothing that serves them is needed any more
            self.services.look()
        if self.hung is None and (lag := self._lagging(running)):
            self._give_up(running, lag)
        return bool(running)

    def _pass_on(self, running: Sequence[Process]) -> None:
        """Tell the ranks of signals that came; after the second they have little time left. They are served until
        they end."""
        for number in self.interrupts.noted_signals[self.noticed :]:
            self.noticed += 1
            if number == SAVE:
                for member in running:
                    if member.ear.begun:  # one that has not has nothing to save
                        member.signal(number)
                continue
            self.passed_on += 1
            for member in running:
                if member.ear.begun:
                    member.signal(number)
                else:  # it cannot word it yet
                    member.kill()
            if self.passed_on > 1:
                self.deadline = min(self.deadline, time.monotonic() + GRACE_S)

    def _is_over(self) -> bool:
        """Whether the job cannot go on: a rank ended otherwise than well, here or elsewhere. One that was interrupted
        after a step is none: others may still be saving."""
        verdict = self._judged([member for member in self.members if not member.runs()])
        if verdict is not None and (verdict.strength != INTERRUPTED or not self._has_begun()):
            if self.machines is not None:
                self.machines.tell()
            return True
        return self.machines is not None and self.machines.is_over()

    def _judged(self, members: Sequence[Process]) -> Verdict | None:
        """Why these ranks ended, or the job has to."""
        ranks = judge([member.ended() for member in members], self.interrupts.received)
        found = [verdict for verdict in (self.services.failed, ranks) if verdict is not None]
        return min(found, key=lambda verdict: verdict.strength, default=None)

    def _has_begun(self) -> bool:
        return any(member.ear.step for member in self.members)

    def _lagging(self, running: Sequence[Process]) -> list[Process]:
        """The ranks that are silent, or that others have waited for and that do not say why they end."""
        now = time.monotonic()
        if silent := [member for member in running if now - member.ear.heard > deadline_s(self.spec)]:
            return silent
        reports = [member.ear.report for member in self.members if member.ear.report is not None]
        if not reports or any(report.kind != "waited" for report in reports):
            return []
        self.waited_since = self.waited_since or now
        return [m for m in running if m.ear.report is None] if now - self.waited_since > CAUSE_S else []

    def _give_up(self, running: Sequence[Process], lagging_ones: Sequence[Process]) -> None:
        """Have all stacks written, and the job ended."""
        where = dump_stacks(running, lagging_ones)
        logs = f"every rank's stacks: {shown(self.folder.log)}, {shown(self.folder.ranks)}/*.log"
        self.hung = lagging([member.order.name for member in lagging_ones], deadline_s(self.spec), [*where, logs])
        self.deadline = time.monotonic()
        if self.machines is not None:
            self.machines.tell()

    def _end(self) -> None:
        """Whatever happened: nothing of this job is left running here."""
        kill_all(self.members)
        self.services.end()
        leader = next((member for member in self.members if member.order.leads), None)
        if leader is not None and leader.ended().code != 0 and sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # a live screen that was killed has hidden it
            sys.stdout.flush()

    def _with_way_on(self, verdict: Verdict) -> Verdict:
        """With what to type next, where nothing is wrong with the job itself."""
        if is_stage() or verdict.strength not in (KILLED, LAGGED, WAITED):
            return verdict
        return verdict._replace(message=f"{verdict.message}\n  continue: run resume {called(self.folder)}")


def kill_all(members: Sequence[Process]) -> None:
    """End those that still run, at once."""
    for member in members:
        member.kill()
    for member in members:
        member.ended()


def environment(meeting: tuple[str, int]) -> Mapping[str, str]:
    """What all ranks have in their environment to meet one another, beside their places."""
    return {
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
        # torch's word for: the store is held by who started the ranks, so all of them are its clients
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@dataclass(slots=True)
class Services:
    """Those of one attempt, none where the ranks do it all. `failed`: why the job cannot go on without one of them."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    starter: Starter
    environment: Mapping[str, str]  # of each
    say: Callable[[str, str], None]
    members: list[Process] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)  # how often, by place in `members`
    failed: Verdict | None = None

    @property
    def replaced(self) -> dict[str, int]:
        """How often each was started anew, by name."""
        return {self.members[at].order.name: times for at, times in self.lost.items()}

    def start(self) -> None:
        """Start all. Raises StorageError, EnvironmentProblem."""
        orders = list(self._samplers())
        for place in {order.folder.log.parent for order in orders}:
            place.mkdir(exist_ok=True)
            for note in place.glob(NOTES):
                note.unlink()  # of a process that a killed launcher had
        for order in orders:
            self.members.append(self.starter.start(order))

    def look(self) -> None:
        """Take in what has happened, and start anew what is lost. Raises StorageError, EnvironmentProblem."""
        for at, member in enumerate(self.members):
            if self.failed is None and (verdict := self._lost(member)) is not None:
                self._replace(at, verdict)

    def end(self) -> None:
        """End those that still run, with the time to end what they have started, an engine and its memory."""
        for member in self.members:
            if member.runs():
                member.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while any([member.runs() for member in self.members]) and time.monotonic() < deadline:  # all are looked at
            time.sleep(POLL_S)
        kill_all(self.members)

    def _samplers(self) -> Iterator[Order]:
        each = self.spec.sampler.cards()
        for index in range(count_of(self.spec)):
            first = self.spec.launch.devices + index * each
            yield Order(
                role="sampler",
                index=index,
                folder=self.folder.of_sampler(index),
                attempt=self.attempt,
                cards=tuple(range(first, first + each)),
                environment=self.environment,
            )

    def _lost(self, member: Process) -> Verdict | None:
        """Why it is lost, None if it is not."""
        if not member.runs():
            ended = member.ended()
            text = f"{member.order.name} ended, and nobody told it to; see {ended.log}"
            return judge([ended]) or Verdict(OWN, text, LOST)
        member.ear.listen()
        limit = silence_s(self.spec)
        if time.monotonic() - member.ear.heard <= limit:
            return None
        [where] = dump_stacks([member], [member])
        member.kill()
        member.ended()
        return Verdict(KILLED, f"{where}, and has said nothing for {limit:g} s", LOST)

    def _replace(self, at: int, verdict: Verdict) -> None:
        """Start another one in its place, unless it was the last time."""
        given = self.spec.launch.replacements
        most, times = REPLACEMENTS if given is None else given, self.lost.get(at, 0)
        order = self.members[at].order
        if verdict.exit_code in LASTING:
            self.failed = verdict
        elif times >= most:
            again = f"it was started anew {times} times, and launch.replacements={most}"
            self.failed = verdict._replace(
                message=f"{verdict.message}\n  {again}; what it said: {shown(order.folder.log)}"
            )
        else:
            self.lost[at] = times + 1
            first, *_ = verdict.message.splitlines()
            self.say(f"{first}; it is started anew ({times + 1} of {most}), and asked again", "warning")
            self.members[at] = self.starter.start(order)


def count_of(spec: JobSpec) -> int:
    """How many processes launch.samplers devices are for."""
    return spec.launch.samplers // spec.sampler.cards()


def silence_s(spec: JobSpec) -> float:
    """Seconds without a word after which a sampler is taken for lost."""
    return min(SILENT_S, SILENT * spec.sampler.patience_s)
