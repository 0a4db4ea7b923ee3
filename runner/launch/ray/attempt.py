"""The attempts of launch=ray: Ray reserves, its actors start, and the same `Team` watches as on this machine.

                  ┌─▶ runner.ray.guard ▷ runner.launch.ray.driver ─▶ actor 0 ─▶ rank 0
attempt ─▶ Team ──┤                                               ├▶ actor 1 ─▶ rank 1 …
                  └◀── what they say, how they end ───────────────┴▶ actor N ─▶ sampler 0 …
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from runner.carried import carried
from runner.device.kinds import CPU, CUDA
from runner.errors import DeadlineExceeded, EnvironmentProblem, Interrupted, RunnerError
from runner.folder import RunFolder
from runner.launch.attempt import attempts
from runner.launch.member import Order
from runner.launch.ray.config import RayConfig
from runner.launch.ray.link import RayLink, RayProcess
from runner.launch.ray.seats import Seat, described, free, refuse_too_many, seats, table
from runner.launch.service import HOST
from runner.launch.team import Team
from runner.launch.verdict import JobFailed, is_final
from runner.place import Place
from runner.ray.knock import ADDRESS
from runner.ray.link import Link, need_ray
from runner.signals import Interrupts, StopSignal
from runner.spec.job import JobSpec
from runner.tracker.console import Console

LOOPBACK = "127.0.0.1"
FREE_S = 30.0  # for what somebody else has to become free: an attempt that ended just now gives it back
PATIENCE_S = 2.0  # before that is said
HIRE_S = 120.0  # for the actors to begin, and to answer
POLL_S = 0.1


def attempt(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> int:
    """Make attempt `number` at a job in a folder that the caller has locked, and others; returns 0.

    Raises EnvironmentProblem where Ray is not there or has no room, RunnerError.
    """
    need_ray("launch=ray")
    attempts(spec, folder, number, lambda now: _run(spec, folder, now))
    return 0


def _run(spec: JobSpec, folder: RunFolder, number: int) -> None:
    with reserved(spec, Console(folder.log).message) as starter:
        Team(spec, folder, number, starter).run()


@contextmanager
def reserved(spec: JobSpec, say: Callable[[str], None]) -> Iterator[RayStarter]:
    """All seats of a job, for as long as the block lasts. Raises EnvironmentProblem, Interrupted."""
    assert isinstance(spec.launch, RayConfig)
    wanted, stop, address = seats(spec), StopSignal(), spec.launch.address
    own = _of_this_machine(spec, wanted) if address is None else {}
    with stop.installed(), stop.at_once():
        link = RayLink({"address": address, "resources": own}).__enter__()
    with closed(link):
        with stop.installed(), stop.at_once():
            starter = RayStarter(spec, link, wanted)
            say(starter.reserve(say))
        yield starter


@contextmanager
def closed(link: Link) -> Iterator[None]:
    """End Ray after the block, which takes seconds, and a bounded time. A signal meanwhile changes nothing about how
    the block has ended, but no other attempt follows it. Raises JobFailed for an error that one would follow."""
    held = Interrupts()
    try:
        try:
            yield
        finally:
            with held.noted():
                link.__exit__(None, None, None)
    except RunnerError as error:
        if not held.received or isinstance(error, Interrupted) or is_final(error):
            raise
        raise JobFailed(str(error), error.exit_code, stopped=True) from error


class RayStarter:
    """The `Starter` of launch=ray: each process on its seat."""

    def __init__(self, spec: JobSpec, link: RayLink, wanted: Sequence[Seat]) -> None:
        self._spec, self._link, self._wanted = spec, link, wanted

    def reserve(self, say: Callable[[str], None]) -> str:
        """Wait for the seats; returns who sits where, for the user. Raises EnvironmentProblem where they are not free,
        DeadlineExceeded where Ray's actors do not begin."""
        link, what = self._link, described(self._wanted)
        refuse_too_many(self._wanted, link.nodes, link.where)
        brought = carried(os.environ)
        chosen = [(seat.role, seat.resource, seat.count) for seat in self._wanted]
        link.send(do="reserve", seats=chosen, kind=self._spec.device.kind.name, carried=brought, folder=os.getcwd())
        begin, told = time.monotonic(), False
        while not link.taken:
            link.hear(POLL_S)
            waited = time.monotonic() - begin
            if link.free is not None and waited > PATIENCE_S and not told:
                told = True
                say(f"waiting  at most {FREE_S:g} s: {self._lack()}")
            if link.free is not None and waited > FREE_S:
                raise EnvironmentProblem(f"{self._lack()}; `ray status` says who has the rest: try again later")
            if waited > FREE_S + HIRE_S:
                raise DeadlineExceeded(
                    f"{link.where}: {what} are reserved, and the actors did not begin in {HIRE_S:g} s"
                )
        lines = [f"ray      {link.where}: {what} in one placement group", *table(self._wanted, link.taken)]
        if self._spec.launch.here and (named := os.environ.get(ADDRESS)):
            lines.append(f"note     {ADDRESS}={named} is not used without launch.address=auto")
        if not self._spec.launch.here:
            lines.append(f"carried  of this environment: {', '.join(sorted(brought)) or 'nothing'}")
        return "\n".join(lines)

    def places(self) -> list[Place]:
        """Each rank sees its own device alone, as if it were on a machine of its own."""
        return [Place(rank, self._spec.launch.world, 0, 1) for rank in range(self._spec.launch.world)]

    def meeting(self) -> tuple[str, int]:
        """Where rank 0's actor listens. Raises EnvironmentProblem where it does not say."""
        return self._link.meet(0, LOOPBACK if self._is_one_node() else self._link.taken[0].node)

    def start(self, order: Order) -> RayProcess:
        """Have it started."""
        at = [(seat.role, seat.index) for seat in self._wanted].index((order.role, order.index))
        more = {}
        if not self._is_one_node():
            more[HOST] = self._link.taken[at].node
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            more["GLOO_SOCKET_IFNAME"] = "lo"  # a host's own name need not lead anywhere, as in many containers
        return self._link.start(at, replace(order, environment={**more, **order.environment}))

    def close(self) -> None:
        """What it holds is the block's, of `reserved`."""

    def _is_one_node(self) -> bool:
        return len({place.node for place in self._link.taken}) == 1

    def _lack(self) -> str:
        """What is missing of what is wanted."""
        has = free(self._wanted, self._link.nodes, self._link.free or {})
        return f"the job wants {described(self._wanted)}, and {self._link.where} has {has} free"


def _of_this_machine(spec: JobSpec, wanted: Sequence[Seat]) -> dict[str, Any]:
    """What a cluster of our own declares: what the job needs. Raises EnvironmentProblem where this machine lacks it."""
    count = sum(seat.count for seat in wanted)
    kind, cards = spec.device.kind, spec.device.visible()
    if kind is CPU or cards is None:  # which any number of processes share
        return {"num_cpus": count, "num_gpus": 0}
    refuse_too_many(wanted, [{kind.resource: len(cards)}], "this machine")
    if kind is CUDA:
        return {"num_cpus": 1, "num_gpus": count}
    return {"num_cpus": 1, "num_gpus": 0, "resources": {kind.resource: count}}
