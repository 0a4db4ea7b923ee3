"""The ranks of a job on this machine: started together, watched, and ended together.

start ─▶ all end well                                   ─▶ done
      ├▶ one ends otherwise ─▶ the others have 5 s      ─▶ its error, once
      ├▶ one is silent, or is waited for too long       ─▶ every rank's stacks, who lags, the end
      └▶ SIGINT, SIGTERM, passed on to each once        ─▶ they save together; again: they end at once
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from runner.folder import RunFolder, shown
from runner.launch import hang
from runner.launch.machines import Machines, deadline_s
from runner.launch.member import Member
from runner.launch.session import called
from runner.launch.stage import is_stage
from runner.launch.verdict import INTERRUPTED, KILLED, LAGGED, WAITED, Verdict, judge, lagging
from runner.place import Place
from runner.signals import Interrupts
from runner.spec.job import JobSpec

POLL_S = 0.05
GRACE_S = 5.0  # for ranks to end by themselves once one has ended
CAUSE_S = 3.0  # for a cause to be heard of where ranks say that they waited in vain
LOOPBACK = "127.0.0.1"
SHOW_CURSOR = "\x1b[?25h"


@dataclass(slots=True)
class Team:
    """The ranks of this machine, in attempt `attempt` at a job."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    machines: Machines | None = None
    members: list[Member] = field(default_factory=list)
    interrupts: Interrupts = field(default_factory=Interrupts)
    passed_on: int = 0  # signals that the ranks were told of
    deadline: float = float("inf")  # when ranks that still run are killed
    waited_since: float = 0.0  # when the first rank was heard to have waited in vain; 0: none was
    hung: Verdict | None = None

    def run(self) -> None:
        """Run to the end. Raises the error of the rank that is the cause where it does not end well."""
        with self.interrupts.noted():
            try:
                self._start()
                while self._look():
                    time.sleep(POLL_S)
            finally:
                self._end()
        verdict = self.hung or self._judged(self.members)
        if self.machines is not None:
            verdict = self.machines.agree(verdict)
        if verdict is not None:
            raise self._with_way_on(verdict).error()

    def _start(self) -> None:
        size = self.spec.launch.devices
        first = size * (self.spec.launch.node or 0)
        self.folder.ranks.mkdir(exist_ok=True)
        with ExitStack() as closing:
            if self.machines is None:
                own = closing.enter_context(socket.create_server((LOOPBACK, 0), backlog=512))
                listener: socket.socket | None = own
                meeting = (LOOPBACK, own.getsockname()[1])
            else:
                listener, meeting = self.machines.listener, self.machines.store
            shared = environment(meeting, size, self.spec.launch.nodes)
            for local in range(size):
                place = Place(first + local, self.spec.launch.world, local, size)
                handle = listener.fileno() if listener is not None and place.leads else None
                self.members.append(Member.start(place, self.folder, self.attempt, shared, handle))

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
        if self.hung is None and (lag := self._lagging(running)):
            self._give_up(running, lag)
        return bool(running)

    def _pass_on(self, running: Sequence[Member]) -> None:
        """Tell the ranks of signals that came; after the second they have little time left."""
        for number in self.interrupts.received[self.passed_on :]:
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
        verdict = self._judged([member for member in self.members if member.process.returncode is not None])
        if verdict is not None and (verdict.strength != INTERRUPTED or not self._has_begun()):
            if self.machines is not None:
                self.machines.tell()
            return True
        return self.machines is not None and self.machines.is_over()

    def _judged(self, members: Sequence[Member]) -> Verdict | None:
        return judge([member.ended() for member in members], self.interrupts.received)

    def _has_begun(self) -> bool:
        return any(member.ear.step for member in self.members)

    def _lagging(self, running: Sequence[Member]) -> list[Member]:
        """The ranks that are silent, or that others have waited for and that do not say why they end."""
        now = time.monotonic()
        if silent := [member for member in running if now - member.ear.heard > deadline_s(self.spec)]:
            return silent
        reports = [member.ear.report for member in self.members if member.ear.report is not None]
        if not reports or any(report.kind != "waited" for report in reports):
            return []
        self.waited_since = self.waited_since or now
        return [m for m in running if m.ear.report is None] if now - self.waited_since > CAUSE_S else []

    def _give_up(self, running: Sequence[Member], lagging_ones: Sequence[Member]) -> None:
        """Have all stacks written, and the job ended."""
        where = hang.dump(running, lagging_ones)
        logs = f"every rank's stacks: {shown(self.folder.log)}, {shown(self.folder.ranks)}/*.log"
        self.hung = lagging([member.name for member in lagging_ones], deadline_s(self.spec), [*where, logs])
        self.deadline = time.monotonic()
        if self.machines is not None:
            self.machines.tell()

    def _end(self) -> None:
        """Whatever happened: nothing of this job is left running here."""
        for member in self.members:
            member.kill()
        for member in self.members:
            member.process.wait()
            member.ear.listen()
            member.ear.close()
        leader = next((member for member in self.members if member.place.leads), None)
        if leader is not None and leader.process.returncode not in (0, None) and sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # a live screen that was killed has hidden it
            sys.stdout.flush()

    def _with_way_on(self, verdict: Verdict) -> Verdict:
        """With what to type next, where nothing is wrong with the job itself."""
        if is_stage() or verdict.strength not in (KILLED, LAGGED, WAITED):
            return verdict
        return verdict._replace(message=f"{verdict.message}\n  go on: run resume {called(self.folder)}")


def environment(meeting: tuple[str, int], size: int, nodes: int) -> Mapping[str, str]:
    """What all ranks of a machine have in their environment, beside their places."""
    cores = len(os.sched_getaffinity(0))
    found = {
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
        "LOCAL_WORLD_SIZE": str(size),
        # torch's word for: the store is held by who started the ranks, so all of them are its clients
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(cores // size, 1))
    if nodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        found["GLOO_SOCKET_IFNAME"] = "lo"  # a host's own name need not lead anywhere, as in many containers
    return found
