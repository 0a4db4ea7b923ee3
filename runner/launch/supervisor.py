"""The processes of a job that one launcher has started: begun together, watched, and ended together.

start ─▶ all ranks end well                             ─▶ done: samplers are stopped
      ├▶ a rank ends otherwise ─▶ the others have 5 s   ─▶ its error, once
      ├▶ a rank is silent, or waited for too long       ─▶ every rank's stacks, who lags, the end
      ├▶ a sampler is lost                              ─▶ restart it, a limited number of times; its work is repeated
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

from runner.core.signals import SAVE, SignalRecorder
from runner.launch.exit_cause import (
    INTERRUPTED,
    KILLED,
    LAGGED,
    LASTING,
    LOST,
    OWN,
    WAITED,
    ExitCause,
    find_cause,
    hang_cause,
)
from runner.launch.multi_node import PeerNodes, peer_timeout_s
from runner.launch.run_records import is_upstream_run
from runner.launch.session import run_argument
from runner.launch.worker_process import WorkerLauncher, WorkerProcess, WorkerSpec, WorkerStatusFile, dump_stacks
from runner.run_dir.folder import RunFolder, display_path
from runner.sampler.server.job_token import TOKEN
from runner.spec.job import JobSpec
from runner.tracker.console import Console

POLL_S = 0.05
GRACE_S = 5.0  # for processes to end by themselves once a rank has ended
CAUSE_S = 3.0  # for a cause to arrive where ranks report that they waited in vain
SHOW_CURSOR = "\x1b[?25h"
SILENT = 1 / 3  # of sampler.timeout_s at most: then there is time left to start another one, and for that one to answer
SILENT_S = 300.0  # at most: as long as a library may be read from a slow disk, when no other thread can send
REPLACEMENTS = 3  # where launch.max_worker_restarts says nothing
NOTES = "*.json"  # in the folders of their logs: where each is reached


@dataclass(slots=True)
class Supervisor:
    """The ranks and samplers that `starter` starts, in attempt `attempt` at a job."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    starter: WorkerLauncher
    machines: PeerNodes | None = None
    members: list[WorkerProcess] = field(default_factory=list)  # the ranks
    services: SamplerProcesses = field(init=False)
    roster: WorkerStatusFile = field(init=False)
    interrupts: SignalRecorder = field(default_factory=lambda: SignalRecorder(saves=True))
    noticed: int = 0  # signals that arrived and were handled
    signals_forwarded: int = 0  # those of them that stop the ranks
    deadline: float = float("inf")  # when ranks that still run are killed
    waited_since: float = 0.0  # when the first rank reported that it waited in vain; 0: none did
    hung: ExitCause | None = None

    def __post_init__(self) -> None:
        shared = {TOKEN: secrets.token_urlsafe(32)} if self.spec.launch.samplers else {}
        say = Console(self.folder.log).message
        self.roster = WorkerStatusFile(self.folder, self.attempt, self.spec.launch.machine)
        self.services = SamplerProcesses(self.spec, self.folder, self.attempt, self.starter, shared, say)

    def run(self) -> None:
        """Run to the end. Raises the error of the process that is the cause where it does not end well."""
        with self.interrupts.record_signals():
            try:
                self._start()
                while self._poll():
                    self._write_status()
                    time.sleep(POLL_S)
            finally:
                self._end()
                self._write_status(over=True)
        verdict = self.hung or self._exit_cause(self.members)
        if self.machines is not None:
            verdict = self.machines.agree_on_cause(verdict)
        if verdict is not None:
            raise self._with_resume_hint(verdict).to_error(stopped=bool(self.interrupts.stop_signals))

    def _start(self) -> None:
        self.folder.ranks.mkdir(exist_ok=True)
        meeting, secret = self.starter.rendezvous_address(), self.services.environment
        for place in self.starter.local_ranks():
            order = WorkerSpec(
                role="rank",
                index=place.rank,
                folder=self.folder.for_rank(place.rank),
                attempt=self.attempt,
                cards=(place.local_rank,),
                environment={
                    **rendezvous_environment(meeting),
                    **(secret if place.is_rank0 else {}),
                    **place.to_environment(),
                },
                place=place,
                meets=place.is_rank0 and place.size > 1,
            )
            self.members.append(self.starter.start(order))
        self.services.start()

    def _write_status(self, *, over: bool = False) -> None:
        """Have it written who takes part."""
        self.roster.write([*self.members, *self.services.members], self.services.restart_counts, over=over)

    def _poll(self) -> bool:
        """Take in what has happened; whether a rank still runs."""
        running = [member for member in self.members if member.is_running()]
        for member in running:
            member.heartbeat.receive()
        self._forward_signals(running)
        if time.monotonic() > self.deadline:
            for member in running:
                member.kill()
        elif self._is_over():
            self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
        elif running and self.deadline == float("inf"):  # else nothing that serves them is needed any more
            self.services.restart_lost()
        if self.hung is None and (lag := self._unresponsive(running)):
            self._end_hung_job(running, lag)
        return bool(running)

    def _forward_signals(self, running: Sequence[WorkerProcess]) -> None:
        """Send received signals to the ranks; after the second one they have little time left."""
        for number in self.interrupts.noted_signals[self.noticed :]:
            self.noticed += 1
            if number == SAVE:
                for member in running:
                    if member.heartbeat.begun:  # one that has not has nothing to save
                        member.signal(number)
                continue
            self.signals_forwarded += 1
            for member in running:
                if member.heartbeat.begun:
                    member.signal(number)
                else:  # it cannot word it yet
                    member.kill()
            if self.signals_forwarded > 1:
                self.deadline = min(self.deadline, time.monotonic() + GRACE_S)

    def _is_over(self) -> bool:
        """Whether a rank has failed, here or elsewhere. A rank that was interrupted after a step has not:
        others may still be saving."""
        verdict = self._exit_cause([member for member in self.members if not member.is_running()])
        if verdict is not None and (verdict.strength != INTERRUPTED or not self._has_begun()):
            if self.machines is not None:
                self.machines.announce_end()
            return True
        return self.machines is not None and self.machines.is_over()

    def _exit_cause(self, members: Sequence[WorkerProcess]) -> ExitCause | None:
        """Why these ranks ended, or the job has to."""
        ranks = find_cause([member.wait_for_exit() for member in members], self.interrupts.stop_signals)
        found = [verdict for verdict in (self.services.failed, ranks) if verdict is not None]
        return min(found, key=lambda verdict: verdict.strength, default=None)

    def _has_begun(self) -> bool:
        return any(member.heartbeat.step for member in self.members)

    def _unresponsive(self, running: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """The ranks that are silent, or that others have waited for and that do not say why they end."""
        now = time.monotonic()
        if silent := [member for member in running if now - member.heartbeat.last_heard > peer_timeout_s(self.spec)]:
            return silent
        reports = [member.heartbeat.report for member in self.members if member.heartbeat.report is not None]
        if not reports or any(report.kind != "waited" for report in reports):
            return []
        self.waited_since = self.waited_since or now
        return [m for m in running if m.heartbeat.report is None] if now - self.waited_since > CAUSE_S else []

    def _end_hung_job(self, running: Sequence[WorkerProcess], lagging_ones: Sequence[WorkerProcess]) -> None:
        """Have all stacks written, and the job ended."""
        where = dump_stacks(running, lagging_ones)
        logs = f"every rank's stacks: {display_path(self.folder.log)}, {display_path(self.folder.ranks)}/*.log"
        self.hung = hang_cause(
            [member.order.name for member in lagging_ones], peer_timeout_s(self.spec), [*where, logs]
        )
        self.deadline = time.monotonic()
        if self.machines is not None:
            self.machines.announce_end()

    def _end(self) -> None:
        """Whatever happened: nothing of this job is left running here."""
        kill_all(self.members)
        self.services.end()
        leader = next((member for member in self.members if member.order.is_rank0), None)
        if leader is not None and leader.wait_for_exit().code != 0 and sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # a live screen that was killed has hidden it
            sys.stdout.flush()

    def _with_resume_hint(self, verdict: ExitCause) -> ExitCause:
        """With what to type next, where nothing is wrong with the job itself."""
        if is_upstream_run() or verdict.strength not in (KILLED, LAGGED, WAITED):
            return verdict
        return verdict._replace(message=f"{verdict.message}\n  continue: run resume {run_argument(self.folder)}")


def kill_all(members: Sequence[WorkerProcess]) -> None:
    """End those that still run, at once."""
    for member in members:
        member.kill()
    for member in members:
        member.wait_for_exit()


def rendezvous_environment(meeting: tuple[str, int]) -> Mapping[str, str]:
    """What all ranks have in their environment to meet one another, beside their places."""
    return {
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
        # torch's word for: the store is held by who started the ranks, so all of them are its clients
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@dataclass(slots=True)
class SamplerProcesses:
    """Sampler processes of one attempt. `failed`: why the job cannot continue without one of them."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    starter: WorkerLauncher
    environment: Mapping[str, str]  # of each
    say: Callable[[str, str], None]
    members: list[WorkerProcess] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)  # how often, by place in `members`
    failed: ExitCause | None = None

    @property
    def restart_counts(self) -> dict[str, int]:
        """How often each was restarted, by name."""
        return {self.members[at].order.name: times for at, times in self.lost.items()}

    def start(self) -> None:
        """Start all. Raises StorageError, EnvironmentProblem."""
        orders = list(self._sampler_specs())
        for place in {order.folder.log.parent for order in orders}:
            place.mkdir(exist_ok=True)
            for note in place.glob(NOTES):
                note.unlink()  # of a process that a killed launcher had
        for order in orders:
            self.members.append(self.starter.start(order))

    def restart_lost(self) -> None:
        """Take in what has happened, and start again what is lost. Raises StorageError, EnvironmentProblem."""
        for at, member in enumerate(self.members):
            if self.failed is None and (verdict := self._loss_cause(member)) is not None:
                self._restart(at, verdict)

    def end(self) -> None:
        """End those that still run, with the time to end what they have started, an engine and its memory."""
        for member in self.members:
            if member.is_running():
                member.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while (
            any([member.is_running() for member in self.members]) and time.monotonic() < deadline
        ):  # all are looked at
            time.sleep(POLL_S)
        kill_all(self.members)

    def _sampler_specs(self) -> Iterator[WorkerSpec]:
        each = self.spec.sampler.cards()
        for index in range(sampler_count(self.spec)):
            first = self.spec.launch.devices + index * each
            yield WorkerSpec(
                role="sampler",
                index=index,
                folder=self.folder.for_sampler(index),
                attempt=self.attempt,
                cards=tuple(range(first, first + each)),
                environment=self.environment,
            )

    def _loss_cause(self, member: WorkerProcess) -> ExitCause | None:
        """Why it is lost, None if it is not."""
        if not member.is_running():
            ended = member.wait_for_exit()
            text = f"{member.order.name} exited unexpectedly; see {ended.log}"
            return find_cause([ended]) or ExitCause(OWN, text, LOST)
        member.heartbeat.receive()
        limit = sampler_timeout_s(self.spec)
        if time.monotonic() - member.heartbeat.last_heard <= limit:
            return None
        [where] = dump_stacks([member], [member])
        member.kill()
        member.wait_for_exit()
        return ExitCause(KILLED, f"{where}, and sent no heartbeat for {limit:g} s", LOST)

    def _restart(self, at: int, verdict: ExitCause) -> None:
        """Start another one in its place, unless it was the last time."""
        given = self.spec.launch.max_worker_restarts
        most, times = REPLACEMENTS if given is None else given, self.lost.get(at, 0)
        order = self.members[at].order
        if verdict.exit_code in LASTING:
            self.failed = verdict
        elif times >= most:
            again = f"it was restarted {times} times, the limit is launch.max_worker_restarts={most}"
            self.failed = verdict._replace(
                message=f"{verdict.message}\n  {again}; its log: {display_path(order.folder.log)}"
            )
        else:
            self.lost[at] = times + 1
            first, *_ = verdict.message.splitlines()
            self.say(f"{first}; restarting it ({times + 1} of {most}) and retrying", "warning")
            self.members[at] = self.starter.start(order)


def sampler_count(spec: JobSpec) -> int:
    """How many processes launch.samplers devices are for."""
    return spec.launch.samplers // spec.sampler.cards()


def sampler_timeout_s(spec: JobSpec) -> float:
    """Seconds without a word after which a sampler is taken for lost."""
    return min(SILENT_S, SILENT * spec.sampler.patience_s)
