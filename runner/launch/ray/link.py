"""The line to Ray's driver for a job (runner.launch.ray.driver), and a process of the job as this end of it sees it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from runner.errors import EnvironmentProblem, RankLost
from runner.folder import shown
from runner.launch.link import Ear
from runner.launch.member import Order
from runner.launch.ray.child import packed
from runner.launch.ray.seats import Taken
from runner.launch.verdict import Ended
from runner.ray import link

MEET_S = 60.0  # for an actor to listen
KILL_S = 10.0  # for a process that is killed to be told of; then its actor is
SIGKILL = 9


class RayLink(link.Link):
    """Ray's driver. `taken`: where the seats are; `free`: what the cluster has left, while they are waited for;
    `broken`: why nobody answers any more."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        super().__init__("runner.launch.ray.driver", asked)
        self.taken: list[Taken] = []
        self.free: Mapping[str, float] | None = None
        self._met: list[tuple[str, int]] = []
        self.broken = ""
        self._processes: dict[int, RayProcess] = {}

    def meet(self, seat: int, host: str) -> tuple[str, int]:
        """Have a seat's actor listen for the ranks at an address of its node; returns that and the port.

        Raises EnvironmentProblem where it cannot.
        """
        self.send(do="meet", seat=seat, host=host)
        self.wait_for(lambda: bool(self._met), MEET_S)
        return self._met.pop()

    def start(self, seat: int, order: Order) -> RayProcess:
        """Have a process started on a seat, whose last one has ended."""
        process = self._processes[seat] = RayProcess(self, seat, order)
        self.send(do="start", seat=seat, order=packed(order))
        return process

    def follow(self, wait_s: float = 0.0) -> None:
        """Take in what is said of the processes; where the driver is gone, all of them are."""
        try:
            if not self.broken:
                self.hear(wait_s)
        except (EnvironmentProblem, RankLost) as error:
            self.broken = str(error)
            for process in self._processes.values():
                process.lose(self.broken)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["is"]
        if kind == "reserved":
            self.taken = [Taken(node, host, tuple(devices)) for node, host, devices in event["taken"]]
        elif kind in ("waiting", "placed"):
            self.free = event.get("free")
        elif kind == "met":
            self._met.append((event["host"], event["port"]))
        elif (process := self._processes.get(event["seat"])) is None:
            problem = EnvironmentProblem if event["unfit"] else RankLost
            raise problem(f"{self.where}: {event['why']}")  # an actor, before anything was started
        elif kind == "said":
            process.take(event)
        elif kind == "ended":
            process.code = event["code"]
        else:
            process.lose(event["why"])


class RayProcess:
    """A process on another node, or below an actor on this one; see `launch.member.Process`."""

    def __init__(self, link: RayLink, seat: int, order: Order) -> None:
        self.order, self.ear = order, Ear()
        self.code: int | None = None
        self._link, self._seat = link, seat
        self._status, self._lost, self._killed = "", "", False

    def runs(self) -> bool:
        """Whether it still does. Once it does not, all that it said was heard."""
        self._link.follow()
        return self.code is None

    def signal(self, number: int) -> None:
        """Send the process, and nothing that it started, a signal."""
        if self.runs():
            self._link.send(do="signal", seat=self._seat, number=number)

    def kill(self) -> None:
        """End it and what it started."""
        if self.runs():
            self._killed = True
            self._link.send(do="kill", seat=self._seat)

    def ended(self) -> Ended:
        """How it ended; waits for one that was killed, and no longer than its actor answers."""
        end = time.monotonic() + KILL_S
        while self.code is None and time.monotonic() < end:
            self._link.follow(0.1)
        if self.code is None:
            self._link.send(do="dismiss", seat=self._seat)
            self.lose("its actor does not answer")
        assert self.code is not None
        log = shown(self.order.folder.log)
        return Ended(self.order.name, self.code, self.ear.report, log, self._killed, self._lost)

    def status(self) -> str:
        """What the process does, one of psutil.STATUS_*, as its actor said last."""
        self._link.follow()
        return self._status

    def take(self, said: Mapping[str, str]) -> None:
        """What it said: to its launcher, to the user."""
        self._status = said["status"]
        if said["pipe"]:
            self.ear.take(said["pipe"].encode("latin-1"))
        _show(sys.stdout, said["out"])
        _show(sys.stderr, said["err"])

    def lose(self, why: str) -> None:
        """Nobody hears it any more; with its actor it has ended."""
        if self.code is None:
            self.code, self._lost = -SIGKILL, why


def _show(screen: TextIO, latin: str) -> None:
    """Print bytes as they came."""
    if latin:
        screen.buffer.write(latin.encode("latin-1"))
        screen.flush()
