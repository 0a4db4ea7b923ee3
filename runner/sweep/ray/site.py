"""Jobs on a Ray cluster, each an actor with its resources; or on a cluster of our own, which ends with the sweep.

Ray itself is in another process, runner.sweep.ray.driver; what became of a job is read from its note.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from runner.carried import carried
from runner.device.kinds import KINDS
from runner.errors import EnvironmentProblem
from runner.ray.link import need_ray
from runner.sweep.config import SweepConfig
from runner.sweep.need import LOWER_CARDS, LOWER_CORES, ORDER, WORDS, Need
from runner.sweep.order import Order
from runner.sweep.outcome import Told
from runner.sweep.ray.link import Link
from runner.sweep.remote import Noted
from runner.sweep.site import Handle, Identity, Say
from runner.sweep.slots import present

MINDER = (sys.executable, "-P", "-m", "runner.sweep.minder")
LATE_S = 3.0  # a shared folder may show the end of a job after Ray has
POLL_S = 0.1


@contextmanager
def opened(options: SweepConfig) -> Iterator[RaySite]:
    """The cluster at `sweep.address`, or one of this machine's own. Raises EnvironmentProblem where there is none."""
    need_ray("sweep.on=ray")
    with Link({"address": options.address, "resources": _of_this_machine()}, options.grace_s) as link:
        yield RaySite(link, options.address, options.parallel)


class RaySite:
    """A Ray cluster. `limit`: jobs at once; None: as many as all its nodes can hold."""

    def __init__(self, link: Link, address: str | None, limit: int | None) -> None:
        self._link, self._address, self._limit = link, address, limit
        self._needs: list[Need] = []
        self._jobs: list[RayJob] = []
        self.parallel = 0

    @property
    def cards(self) -> tuple[str, ...]:
        return tuple(kind for kind in ORDER if self._total(kind))

    def admit(self, needs: Iterable[Need]) -> None:
        self._needs = list(needs)
        for need in self._needs:
            self._refuse(need)
        fit = sum(self._fit([need for need in self._needs if need.kind == kind]) for kind in self._kinds())
        self.parallel = min(self._limit or fit, len(self._needs))

    def _fit(self, alike: Sequence[Need]) -> int:
        """How many jobs of a kind of device all nodes hold at once, if they were as small as the smallest."""
        count = min(need.count for need in alike)
        return sum(devices // count for devices in self._on_nodes(alike[0].kind))

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(need.kind for need in self._needs))

    def describe(self) -> str:
        parts = []
        for kind in self._kinds():
            own = [need for need in self._needs if need.kind == kind]
            least, most = min(need.count for need in own), max(own, key=lambda need: need.count)
            each = str(most) if least == most.count else f"{least} to {most}"
            parts.append(f"{each} each, of {self._total(kind)}")
        at_once = f"{self.parallel} job{'s' if self.parallel > 1 else ''} at once"
        return f"{', '.join(parts)} on {self._nodes()}; {at_once}"

    def has_room(self, need: Need) -> bool:
        self._jobs = [job for job in self._jobs if job.poll() is None]
        return len(self._jobs) < self.parallel

    def start(self, need: Need, order: Order) -> Handle:
        order = replace(order, environment={**carried(os.environ), **order.environment})
        job = RayJob(self._link, {"token": order.token, "note": order.note})
        self._link.send(
            do="start",
            token=order.token,
            name=job.actor,
            resources=_resources(need),
            minder=MINDER,
            order=asdict(order),
        )
        self._jobs.append(job)
        return job

    def take_up(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, Handle]:
        """Those that have an actor go on. Those that lost it are saving, and are waited for."""
        jobs = {index: RayJob(self._link, identity) for index, identity in left.items() if "token" in identity}
        for job in jobs.values():
            self._link.send(do="find", token=job.token, name=job.actor)
        self._link.hear_of({job.token for job in jobs.values()})
        lost = {index: job for index, job in jobs.items() if job.token in self._link.gone}
        told, deadline = False, time.monotonic() + grace_s + LATE_S
        while ending := [str(index) for index, job in lost.items() if job.is_ending]:
            if time.monotonic() > deadline:  # no minder without an actor lets its job live so long
                raise EnvironmentProblem(
                    f"job {', '.join(ending)} runs, and is not known to {self._nodes()}: is it another cluster's? "
                    "sweep.address names the one where the sweep began"
                )
            if not told:
                say(f"waiting for job {', '.join(ending)} of the sweep before, which is saving")
                told = True
            time.sleep(POLL_S)
        known = {index: job for index, job in jobs.items() if index not in lost or job.exit_code is not None}
        self._jobs += [job for job in known.values() if job.exit_code is None]
        return known

    def _on_nodes(self, kind: str) -> list[int]:
        name = "CPU" if kind == "core" else KINDS[kind].resource
        return [int(node.get(name, 0)) for node in self._link.nodes]

    def _total(self, kind: str) -> int:
        return sum(self._on_nodes(kind))

    def _nodes(self) -> str:
        count = len(self._link.nodes)
        where = f"at {self._address}" if self._address else "on this machine"
        return f"{count} node{'s' if count > 1 else ''} of Ray {where}"

    def _refuse(self, need: Need) -> None:
        """A job runs on one node; Ray would wait for ever for a node that has more than any."""
        most = max(self._on_nodes(need.kind), default=0)
        if need.count > most:
            word = WORDS[need.kind] + "s"
            has = f"{most} {word} at most, {self._total(need.kind)} in all" if most else f"no {word}"
            lower = LOWER_CORES if need.kind == "core" else LOWER_CARDS
            advice = lower if most else "`ray status` lists what there is"
            raise EnvironmentProblem(f"a job wants {need} of one node; {self._nodes()}: {has}; {advice}")


class RayJob(Noted):
    """One attempt of a job on Ray."""

    def __init__(self, link: Link, identity: Identity) -> None:
        super().__init__(identity)
        self.identity = identity
        self.token = str(identity["token"])
        self._why: Told | None = None
        self._link, self._signalled = link, 0
        self._gone_since: float | None = None

    @property
    def actor(self) -> str:
        """The name of its actor, by which it is found again."""
        return f"run-{self.token}"

    @property
    def is_ending(self) -> bool:
        """Whether it runs without its actor: then it was told to save and end."""
        note = self.look()
        return note is not None and note.ended is None and not self.is_silent

    @property
    def told(self) -> Told | None:
        return self._why or super().told

    def poll(self) -> int | None:
        self._link.hear()
        if (code := self.exit_code) is not None or self.token not in self._link.gone:
            return code
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if now - self._gone_since < LATE_S or self.is_ending:
            return None
        why = " ".join(self._link.gone[self.token].split())
        if self.look() is not None:
            self._why = Told(f"lost with its node, or ended by Ray: {why}".rstrip(": "), "killed")
        elif self._signalled:
            return -self._signalled  # it never began
        else:
            self._why = Told(f"could not be started on Ray: {why}", "failed")
        return -signal.SIGKILL

    def signal(self, number: int) -> None:
        self._signalled = number
        self._link.send(do="signal", token=self.token, number=number)


def _resources(need: Need) -> dict[str, Any]:
    """What its actor asks of Ray. What is on cards asks for no cores, as on one machine: cards are what is scarce."""
    if need.kind == "core":
        return {"num_cpus": need.count}
    if need.kind == "cuda":
        return {"num_cpus": 0, "num_gpus": need.count}
    return {"num_cpus": 0, "resources": {KINDS[need.kind].resource: need.count}}


def _of_this_machine() -> dict[str, Any]:
    """What a cluster of our own has: what this process may use."""
    npus = len(present("npu"))
    there = {KINDS["npu"].resource: npus} if npus else {}
    return {"num_cpus": len(present("core")), "num_gpus": len(present("cuda")), "resources": there}
