"""Ray's driver for a job, in a process of its own.

Ray takes over signals, prints, and may end its process.

    stdin   {"do": "reserve", "seats": [[role, resource, count], …], "kind", "carried", "folder"}
            {"do": "meet", "seat", "host"} | {"do": "start", "seat", "order"}
            {"do": "signal", "seat", "number"} | {"do": "kill", "seat"} | {"do": "dismiss", "seat"}
                                                                   end of file: the job has ended
    stdout  {"is": "waiting", "free": {"NPU": 3.0}}                each second until all seats are free
            {"is": "placed"}, and once the actors are there
            {"is": "reserved", "taken": [[node, host, [device, …]], …]}
            {"is": "met", "host", "port"}
            {"is": "said", "seat", "pipe", "out", "err", "status"} latin-1 for bytes
            {"is": "ended", "seat", "code"}                        its process
            {"is": "lost", "seat", "why", "unfit"}                 its actor; unfit: which cannot do what it is for

One placement group per job, and a bundle and an actor per process, which the actor starts
(launch/ray/actor_process.py). Nothing
goes through Ray's object store. All of it ends with this process: actors and group are the driver's own.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from runner.core.subprocess import JsonLines
from runner.launch.ray.cluster import connect_cluster
from runner.launch.ray.driver_connection import actor_options
from runner.launch.ray.placement import bundle_order
from runner.launch.worker_process import Role

TICK_S = 0.02
LOOK_S = 1.0  # between two words on a group that waits
HEAR_S = 1.0  # for which an actor waits for its process to say something
DETAIL = re.compile(r"Worker exit detail: (.+?)\. ")  # in what Ray says of an actor whose process is gone
NODE = re.compile(r"\bnode\b.*\b(?:died|dead)\b")
CALLS = 4  # of an actor at a time: one waits, others signal


class WorkerActor:
    """The actor of one worker on its node. Pickled by value; it runs the node's own installation."""

    def __init__(self, kind: str, resource: str) -> None:
        self._kind, self._resource = kind, resource
        self._listener: Any = None
        self._child: Any = None

    def where(self) -> tuple[str, str, list[str]]:
        """Its node's address and name, and its devices. Raises ImportError where the node has no runner."""
        import runner.launch.ray.actor_process  # noqa: F401

        self._devices = ray.get_runtime_context().get_accelerator_ids().get(self._resource, [])
        return ray.util.get_node_ip_address(), socket.gethostname(), self._devices

    def meet(self, host: str) -> tuple[str, int]:
        """Listen for the job's ranks at an address of this node, until the next `start`."""
        if self._listener is not None:
            self._listener.close()
        self._listener = socket.create_server((host, 0), backlog=512)
        return host, self._listener.getsockname()[1]

    def start(self, order: dict[str, Any], carried: dict[str, str], folder: str, alike: int) -> None:
        """Start a process. `folder`: the user's, for display of paths; `alike`: processes on this node."""
        from runner.launch.ray.actor_process import WORKER_SPEC, ActorProcess, worker_environment

        if os.path.isdir(folder):
            os.chdir(folder)
        handle = None
        if order["meets"]:
            handle, self._listener = self._listener.detach(), None
        environment = worker_environment(carried, self._kind, self._devices, alike)
        self._child = ActorProcess(WORKER_SPEC.validate_python(order), environment, handle)

    def hear(self) -> dict[str, Any]:
        """What the process has said since."""
        return dict(self._child.hear(HEAR_S))

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self._child is not None:
            self._child.signal(number)

    def kill(self) -> None:
        """End it and what it started."""
        if self._child is not None:
            self._child.kill()


@dataclass(slots=True)
class ActorSlot:
    """One actor as the driver sees it. `order`: a start that waits for it; `doomed`: its process must end."""

    role: Role
    resource: str
    count: int
    bundle: int = 0
    actor: Any = None
    taken: tuple[str, str, list[str]] | None = None
    order: dict[str, Any] | None = None
    doomed: bool = False


class RayJobDriver:
    """The job's bundles, and the process in each."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._seats: list[ActorSlot] = []
        self._group: Any = None
        self._placed, self._told = False, 0.0
        self._kind = ""
        self._brought: tuple[dict[str, str], str] = {}, ""  # the environment and the folder that the job comes from
        self._calls: dict[Any, tuple[str, int]] = {}  # outstanding calls → the request and its bundle

    def serve(self) -> None:
        """Until the job has ended."""
        while (requests := self._lines.receive(TICK_S)) is not None:
            for request in requests:
                getattr(self, f"_{request.pop('do')}")(**request)
            if self._group is not None and not self._placed:
                self._place_actors()
            self._collect_answers()

    def end(self) -> None:
        """Let go of what this job has of a cluster that continues."""
        for seat in self._seats:
            if seat.actor is not None:
                ray.kill(seat.actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _reserve(self, seats: Sequence[Sequence[Any]], kind: str, carried: dict[str, str], folder: str) -> None:
        self._seats = [ActorSlot(*seat) for seat in seats]
        self._kind, self._brought = kind, (carried, folder)
        self._group = placement_group([{seat.resource: seat.count} for seat in self._seats], strategy="PACK")

    def _place_actors(self) -> None:
        """Start an actor for each bundle once all are reserved."""
        if not self._group.wait(TICK_S):
            if time.monotonic() - self._told > LOOK_S:
                self._told = time.monotonic()
                self._lines.send({"is": "waiting", "free": ray.available_resources()})
            return
        self._placed = True
        self._lines.send({"is": "placed"})
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = bundle_order([nodes[bundle] for bundle in range(len(self._seats))], [seat.role for seat in self._seats])
        for at, bundle in enumerate(order):
            self._seats[at].bundle = bundle
            self._start_actor(at)

    def _start_actor(self, at: int) -> None:
        seat = self._seats[at]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=seat.bundle)
        options = {"scheduling_strategy": place, "max_concurrency": CALLS, "max_restarts": 0}
        options |= actor_options(seat.resource, seat.count)
        seat.actor = ray.remote(WorkerActor).options(**options).remote(self._kind, seat.resource)
        self._call_actor("where", at)

    def _call_actor(self, what: str, at: int, *words: Any) -> None:
        if (actor := self._seats[at].actor) is not None:
            self._calls[getattr(actor, what).remote(*words)] = what, at

    def _meet(self, seat: int, host: str) -> None:
        self._call_actor("meet", seat, host)

    def _start(self, seat: int, order: dict[str, Any]) -> None:
        """Start a process; in place of an actor that is lost, another one is started first."""
        own = self._seats[seat]
        own.order, own.doomed = order, False
        if own.actor is None:
            self._start_actor(seat)
        else:
            self._start_process(seat)

    def _start_process(self, at: int) -> None:
        seat = self._seats[at]
        assert seat.taken is not None
        alike = sum(other.taken[0] == seat.taken[0] for other in self._seats if other.taken is not None)
        self._call_actor("start", at, seat.order, *self._brought, alike)
        seat.order = None

    def _signal(self, seat: int, number: int) -> None:
        self._call_actor("signal", seat, number)

    def _kill(self, seat: int) -> None:
        self._seats[seat].doomed = True
        self._call_actor("kill", seat)

    def _dismiss(self, seat: int) -> None:
        """End an actor that does not respond; the next process in this bundle has another one."""
        if self._seats[seat].actor is not None:
            self._kill_actor(seat)

    def _collect_answers(self) -> None:
        """Take in what the actors answer."""
        ready = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0] if self._calls else []
        for answer in ready:
            if answer not in self._calls:
                continue  # its actor was found to be lost by another answer
            what, at = self._calls.pop(answer)
            try:
                self._handle_answer(what, at, ray.get(answer))
            except RayError as error:
                self._report_lost(at, error)

    def _handle_answer(self, what: str, at: int, answer: Any) -> None:
        seat = self._seats[at]
        if what == "where":
            seat.taken = tuple(answer)
            if seat.order is not None:
                self._start_process(at)
            elif all(other.taken is not None for other in self._seats):
                self._lines.send({"is": "reserved", "taken": [other.taken for other in self._seats]})
        elif what == "meet":
            self._lines.send({"is": "met", "host": answer[0], "port": answer[1]})
        elif what == "start":
            self._call_actor("hear", at)
            if (
                seat.doomed
            ):  # an actor does several things at a time: it may have got the signal before it had a process
                self._call_actor("kill", at)
        elif what == "hear":
            code = answer.pop("code")
            self._lines.send({"is": "said", "seat": at, **answer})
            if code is None:
                self._call_actor("hear", at)
            else:
                self._lines.send({"is": "ended", "seat": at, "code": code})

    def _report_lost(self, at: int, error: RayError) -> None:
        """An actor is gone, or cannot start its process; reported once."""
        seat = self._seats[at]
        if seat.actor is None:
            return
        self._kill_actor(at)
        unfit = getattr(error, "cause", None) is not None
        self._lines.send({"is": "lost", "seat": at, "why": actor_end_reason(error, seat.taken), "unfit": unfit})

    def _kill_actor(self, at: int) -> None:
        """End an actor; its open calls are dropped."""
        seat = self._seats[at]
        ray.kill(seat.actor)
        seat.actor, seat.order = None, None
        self._calls = {call: asked for call, asked in self._calls.items() if asked[1] != at}


def actor_end_reason(error: RayError, taken: Sequence[Any] | None) -> str:
    """Ray's reason for the end of an actor, in a sentence."""
    where = f" on {taken[1]} ({taken[0]})" if taken else ""
    text = " ".join(str(error).split())
    if (cause := getattr(error, "cause", None)) is not None:
        return f"Ray's worker{where} cannot run it ({type(cause).__name__}: {cause})"
    if detail := DETAIL.search(text):
        return f"its actor{where} died; Ray reports: {detail[1]}"
    if NODE.search(text):
        return f"its node{where.removeprefix(' on')} was lost"
    return f"its actor{where} died; Ray reports: {text}"


def main(asked: dict[str, Any]) -> None:
    """Serve one job. `asked`: the request to runner.launch.ray.cluster."""
    lines = JsonLines.to_parent()
    driver = RayJobDriver(lines)
    with connect_cluster(asked, lines):
        driver.serve()
        if asked["address"] is not None:
            driver.end()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
