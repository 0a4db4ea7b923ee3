"""Supervises the processes that one launcher has started: starts, watches and ends them together.

start ─▶ all ranks succeed                              ─▶ done: samplers are stopped
      ├▶ a rank fails ─▶ the others have 5 s            ─▶ its error, once
      ├▶ a rank sends no heartbeat, or does not respond ─▶ stacks of all ranks, the lagging rank; the job ends
      ├▶ a sampler is lost                              ─▶ it is restarted, a limited number of times
      ├▶ SIGINT, SIGTERM, forwarded to each rank once   ─▶ they save together; a second signal stops them immediately
      └▶ SIGUSR1, forwarded to each rank                ─▶ they save together and continue
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
from runner.launch.worker_process import WorkerLauncher, WorkerProcess, WorkerSpec, WorkerStatusFile, dump_stacks
from runner.run_dir.folder import RunFolder, display_path, run_argument
from runner.sampler.server.job_token import TOKEN
from runner.spec.job import JobSpec
from runner.tracker.console import Console

POLL_S = 0.05
GRACE_S = 5.0  # for the other processes to exit after a rank has ended
CAUSE_S = 3.0  # for the cause to arrive after ranks report that another rank did not respond
SHOW_CURSOR = "\x1b[?25h"
SILENT = 1 / 3  # at most this part of sampler.timeout_s, so that there is time for a restarted sampler to respond
SILENT_S = 300.0  # at most: importing a library from a slow disk can block the heartbeat for so long
RESTARTS = 3  # default of launch.max_worker_restarts
NOTES = "*.json"  # endpoint files, beside the samplers' logs


@dataclass(slots=True)
class Supervisor:
    """The ranks and samplers that `launcher` starts, in attempt `attempt` at a job."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    launcher: WorkerLauncher
    machines: PeerNodes | None = None
    members: list[WorkerProcess] = field(default_factory=list)  # the ranks of this machine
    samplers: SamplerProcesses = field(init=False)
    status_file: WorkerStatusFile = field(init=False)
    interrupts: SignalRecorder = field(default_factory=lambda: SignalRecorder(saves=True))
    handled_signals: int = 0  # number of received signals that were handled
    signals_forwarded: int = 0  # number of handled signals that stop the ranks
    deadline: float = float("inf")  # when running ranks are killed
    waited_since: float = 0.0  # when a rank first reported that another does not respond; 0 = never
    hang: ExitCause | None = None

    def __post_init__(self) -> None:
        shared = {TOKEN: secrets.token_urlsafe(32)} if self.spec.launch.samplers else {}
        say = Console(self.folder.log).message
        self.status_file = WorkerStatusFile(self.folder, self.attempt, self.spec.launch.machine)
        self.samplers = SamplerProcesses(self.spec, self.folder, self.attempt, self.launcher, shared, say)

    def run(self) -> None:
        """Run to the end. Raises the error of the process that caused a failure."""
        with self.interrupts.record_signals():
            try:
                self._start()
                while self._poll():
                    self._write_status()
                    time.sleep(POLL_S)
            finally:
                self._end()
                self._write_status(over=True)
        cause = self.hang or self._exit_cause(self.members)
        if self.machines is not None:
            cause = self.machines.agree_on_cause(cause)
        if cause is not None:
            if cause.strength in (KILLED, LAGGED, WAITED) and not is_upstream_run():
                hint = f"continue: run resume {run_argument(self.folder)}"
                cause = cause._replace(message=f"{cause.message}\n  {hint}")
            raise cause.to_error(stopped=bool(self.interrupts.stop_signals))

    def _start(self) -> None:
        self.folder.ranks.mkdir(exist_ok=True)
        address, secret = self.launcher.rendezvous_address(), self.samplers.environment
        for place in self.launcher.local_ranks():
            own = place.to_environment() | dict(secret if place.is_rank0 else {})
            worker = WorkerSpec(
                role="rank",
                index=place.rank,
                folder=self.folder.for_rank(place.rank),
                attempt=self.attempt,
                cards=(place.local_rank,),
                environment={**rendezvous_environment(address), **own},
                place=place,
                hosts_store=place.is_rank0 and place.size > 1,
            )
            self.members.append(self.launcher.start(worker))
        self.samplers.start()

    def _write_status(self, *, over: bool = False) -> None:
        """Write the status file."""
        self.status_file.write([*self.members, *self.samplers.members], self.samplers.restart_counts, over=over)

    def _poll(self) -> bool:
        """Read heartbeats, forward signals, enforce deadlines; returns whether a rank still runs."""
        running = [member for member in self.members if member.is_running()]
        for member in running:
            member.heartbeat.receive()
        self._forward_signals(running)
        if time.monotonic() > self.deadline:
            for member in running:
                member.kill()
        elif self._is_over():
            self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
        elif running and self.deadline == float("inf"):  # otherwise samplers are no longer needed
            self.samplers.restart_lost()
        if self.hang is None and (lag := self._unresponsive(running)):
            self._end_hung_job(running, lag)
        return bool(running)

    def _forward_signals(self, running: Sequence[WorkerProcess]) -> None:
        """Forward received signals to the ranks; after the second stop signal they are killed after GRACE_S."""
        for number in self.interrupts.noted_signals[self.handled_signals :]:
            self.handled_signals += 1
            if number == SAVE:
                for member in running:
                    if member.heartbeat.begun:  # otherwise it has nothing to save
                        member.signal(number)
                continue
            self.signals_forwarded += 1
            for member in running:
                if member.heartbeat.begun:
                    member.signal(number)
                else:  # it cannot handle signals yet
                    member.kill()
            if self.signals_forwarded > 1:
                self.deadline = min(self.deadline, time.monotonic() + GRACE_S)

    def _is_over(self) -> bool:
        """Whether a rank has failed on any machine. A rank that was interrupted after a step has not failed:
        others may still be saving."""
        cause = self._exit_cause([member for member in self.members if not member.is_running()])
        if cause is not None and (cause.strength != INTERRUPTED or not any(m.heartbeat.step for m in self.members)):
            if self.machines is not None:
                self.machines.announce_end()
            return True
        return self.machines is not None and self.machines.is_over()

    def _exit_cause(self, members: Sequence[WorkerProcess]) -> ExitCause | None:
        """Why these ranks ended, or why the job must end."""
        ranks = find_cause([member.wait_for_exit() for member in members], self.interrupts.stop_signals)
        found = [cause for cause in (self.samplers.failed, ranks) if cause is not None]
        return min(found, key=lambda cause: cause.strength, default=None)

    def _unresponsive(self, running: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """The ranks without a heartbeat, or those that do not respond to other ranks and report no error."""
        now = time.monotonic()
        if silent := [member for member in running if now - member.heartbeat.last_heard > peer_timeout_s(self.spec)]:
            return silent
        reports = [member.heartbeat.report for member in self.members if member.heartbeat.report is not None]
        if not reports or any(report.kind != "waited" for report in reports):
            return []
        ended = self._exit_cause([member for member in self.members if not member.is_running()])
        if ended is not None and ended.strength < LAGGED:  # such as a killed rank, which reports nothing
            return []
        self.waited_since = self.waited_since or now
        return [m for m in running if m.heartbeat.report is None] if now - self.waited_since > CAUSE_S else []

    def _end_hung_job(self, running: Sequence[WorkerProcess], lagging: Sequence[WorkerProcess]) -> None:
        """Let all ranks write their stacks, and end the job."""
        where = dump_stacks(running, lagging)
        logs = f"every rank's stacks: {display_path(self.folder.log)}, {display_path(self.folder.ranks)}/*.log"
        names = [member.spec.name for member in lagging]
        self.hang = hang_cause(names, peer_timeout_s(self.spec), [*where, logs])
        self.deadline = time.monotonic()
        if self.machines is not None:
            self.machines.announce_end()

    def _end(self) -> None:
        """Kill every process of the job on this machine that still runs."""
        kill_all(self.members)
        self.samplers.end()
        leader = next((member for member in self.members if member.spec.is_rank0), None)
        if leader is not None and leader.wait_for_exit().code != 0 and sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # a killed live screen has hidden it
            sys.stdout.flush()


def kill_all(members: Sequence[WorkerProcess]) -> None:
    """Kill the processes that still run, and wait until they have ended."""
    for member in members:
        member.kill()
    for member in members:
        member.wait_for_exit()


def rendezvous_environment(address: tuple[str, int]) -> Mapping[str, str]:
    """Variables with which all ranks find the rendezvous store."""
    host, port = address
    # the store exists before the ranks, so all of them are its clients
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


@dataclass(slots=True)
class SamplerProcesses:
    """Sampler processes of one attempt. failed: why the job cannot continue after the loss of one."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    launcher: WorkerLauncher
    environment: Mapping[str, str]  # of each
    say: Callable[[str, str], None]
    members: list[WorkerProcess] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)  # number of losses, by index in `members`
    failed: ExitCause | None = None

    @property
    def restart_counts(self) -> dict[str, int]:
        """Number of restarts by the sampler's name."""
        return {self.members[at].spec.name: times for at, times in self.lost.items()}

    def start(self) -> None:
        """Start all. Raises StorageError, EnvironmentProblem."""
        workers = list(self._sampler_specs())
        for place in {worker.folder.log.parent for worker in workers}:
            place.mkdir(exist_ok=True)
            for note in place.glob(NOTES):
                note.unlink()  # left by a killed launcher
        for worker in workers:
            self.members.append(self.launcher.start(worker))

    def restart_lost(self) -> None:
        """Restart lost samplers. Raises StorageError, EnvironmentProblem."""
        for at, member in enumerate(self.members):
            if self.failed is None and (cause := self._loss_cause(member)) is not None:
                self._restart(at, cause)

    def end(self) -> None:
        """Stop the samplers; each has GRACE_S to shut down its engine and free its memory."""
        for member in self.members:
            if member.is_running():
                member.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while any([m.is_running() for m in self.members]) and time.monotonic() < deadline:  # a list: polls all of them
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
        """Why a sampler is lost; None if it is not."""
        if not member.is_running():
            ended = member.wait_for_exit()
            text = f"{member.spec.name} exited unexpectedly; see {ended.log}"
            return find_cause([ended]) or ExitCause(OWN, text, LOST)
        member.heartbeat.receive()
        limit = min(SILENT_S, SILENT * self.spec.sampler.patience_s)
        if time.monotonic() - member.heartbeat.last_heard <= limit:
            return None
        [where] = dump_stacks([member], [member])
        member.kill()
        member.wait_for_exit()
        return ExitCause(KILLED, f"{where}, and sent no heartbeat for {limit:g} s", LOST)

    def _restart(self, at: int, cause: ExitCause) -> None:
        """Restart a lost sampler, unless the limit is reached or a restart would not help."""
        given = self.spec.launch.max_worker_restarts
        most, times = RESTARTS if given is None else given, self.lost.get(at, 0)
        worker = self.members[at].spec
        if cause.exit_code in LASTING:
            self.failed = cause
        elif times >= most:
            again = f"it was restarted {times} times, the limit is launch.max_worker_restarts={most}"
            text = f"{cause.message}\n  {again}; its log: {display_path(worker.folder.log)}"
            self.failed = cause._replace(message=text)
        else:
            self.lost[at] = times + 1
            first, *_ = cause.message.splitlines()
            self.say(f"{first}; restarting it ({times + 1} of {most}) and retrying", "warning")
            self.members[at] = self.launcher.start(worker)


def sampler_count(spec: JobSpec) -> int:
    """Number of sampler processes on launch.samplers devices."""
    return spec.launch.samplers // spec.sampler.cards()
