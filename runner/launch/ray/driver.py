"""Ray's driver for a job, in its own process, because Ray handles signals, prints, and may exit.

    stdin   {"do": "reserve", "slots": [[role, resource, count], …], "kind", "forwarded", "folder"}
            {"do": "listen", "slot", "host"} | {"do": "start", "slot", "spec"}
            {"do": "signal", "slot", "number"} | {"do": "kill", "slot"} | {"do": "dismiss", "slot"}
                                                                   end of file: the job has ended
    stdout  {"is": "waiting", "free": {"NPU": 3.0}}                each second until all slots are free
            {"is": "placed"}, and once the actors are there
            {"is": "reserved", "locations": [[node, host, [device, …]], …]}
            {"is": "listening", "host", "port"}
            {"is": "output", "slot", "pipe", "out", "err", "status"}  latin-1 for bytes
            {"is": "ended", "slot", "code"}                        its process
            {"is": "lost", "slot", "why", "unfit"}                 its actor; unfit: it cannot start the process

A job has one placement group; each process has a bundle and an actor, which starts it (launch/ray/actor_process.py).
Ray's object store is not used. Actors and placement group end with this process.
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
LOOK_S = 1.0  # between messages about a waiting placement group
RECEIVE_S = 1.0  # for which an actor waits for output of its process
DETAIL = re.compile(r"Worker exit detail: (.+?)\. ")  # in Ray's message about an actor that died
NODE = re.compile(r"\bnode\b.*\b(?:died|dead)\b")
CALLS = 4  # concurrent calls of an actor: one waits for output, others send signals


class WorkerActor:
    """The actor of one worker. Pickled by value; it uses the installation on its node."""

    def __init__(self, kind: str, resource: str) -> None:
        self._kind, self._resource = kind, resource
        self._listener: Any = None
        self._child: Any = None

    def where(self) -> tuple[str, str, list[str]]:
        """Address and name of its node, and its devices. Raises ImportError if the node has no runner."""
        import runner.launch.ray.actor_process  # noqa: F401

        self._devices = ray.get_runtime_context().get_accelerator_ids().get(self._resource, [])
        return ray.util.get_node_ip_address(), socket.gethostname(), self._devices

    def listen(self, host: str) -> tuple[str, int]:
        """Open the socket of the ranks' store at an address of this node, for the next `start`."""
        if self._listener is not None:
            self._listener.close()
        self._listener = socket.create_server((host, 0), backlog=512)
        return host, self._listener.getsockname()[1]

    def start(self, spec: dict[str, Any], forwarded: dict[str, str], folder: str, alike: int) -> None:
        """Start a process. folder: the user's, for displayed paths; alike: number of processes on this node."""
        from runner.launch.ray.actor_process import WORKER_SPEC, ActorProcess, worker_environment

        if os.path.isdir(folder):
            os.chdir(folder)
        handle = None
        if spec["hosts_store"]:
            handle, self._listener = self._listener.detach(), None
        environment = worker_environment(forwarded, self._kind, self._devices, alike)
        self._child = ActorProcess(WORKER_SPEC.validate_python(spec), environment, handle)

    def receive(self) -> dict[str, Any]:
        """New messages and output of the process."""
        return dict(self._child.receive(RECEIVE_S))

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._child is not None:
            self._child.signal(number)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._child is not None:
            self._child.kill()


@dataclass(slots=True)
class ActorSlot:
    """One actor. spec: of a process that it must start; is_killed: its process must end."""

    role: Role
    resource: str
    count: int
    bundle: int = 0
    actor: Any = None
    location: tuple[str, str, list[str]] | None = None
    spec: dict[str, Any] | None = None
    is_killed: bool = False


class RayJobDriver:
    """The job's bundles, and the process in each."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._slots: list[ActorSlot] = []
        self._group: Any = None
        self._placed, self._reported = False, 0.0
        self._kind = ""
        self._origin: tuple[dict[str, str], str] = {}, ""  # environment and folder of the user's command
        self._calls: dict[Any, tuple[str, int]] = {}  # outstanding calls → the request and its bundle

    def serve(self) -> None:
        """Handle requests until the job has ended."""
        while (requests := self._lines.receive(TICK_S)) is not None:
            for request in requests:
                getattr(self, f"_{request.pop('do')}")(**request)
            if self._group is not None and not self._placed:
                self._place_actors()
            self._collect_answers()

    def end(self) -> None:
        """Release the job's actors and placement group in a cluster that continues."""
        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _reserve(self, slots: Sequence[Sequence[Any]], kind: str, forwarded: dict[str, str], folder: str) -> None:
        self._slots = [ActorSlot(*slot) for slot in slots]
        self._kind, self._origin = kind, (forwarded, folder)
        self._group = placement_group([{slot.resource: slot.count} for slot in self._slots], strategy="PACK")

    def _place_actors(self) -> None:
        """Start an actor for each bundle once all are reserved."""
        if not self._group.wait(TICK_S):
            if time.monotonic() - self._reported > LOOK_S:
                self._reported = time.monotonic()
                self._lines.send({"is": "waiting", "free": ray.available_resources()})
            return
        self._placed = True
        self._lines.send({"is": "placed"})
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = bundle_order([nodes[bundle] for bundle in range(len(self._slots))], [slot.role for slot in self._slots])
        for at, bundle in enumerate(order):
            self._slots[at].bundle = bundle
            self._start_actor(at)

    def _start_actor(self, at: int) -> None:
        slot = self._slots[at]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=slot.bundle)
        options = {"scheduling_strategy": place, "max_concurrency": CALLS, "max_restarts": 0}
        options |= actor_options(slot.resource, slot.count)
        slot.actor = ray.remote(WorkerActor).options(**options).remote(self._kind, slot.resource)
        self._call_actor("where", at)

    def _call_actor(self, what: str, at: int, *words: Any) -> None:
        if (actor := self._slots[at].actor) is not None:
            self._calls[getattr(actor, what).remote(*words)] = what, at

    def _listen(self, slot: int, host: str) -> None:
        self._call_actor("listen", slot, host)

    def _start(self, slot: int, spec: dict[str, Any]) -> None:
        """Start a process; a lost actor is replaced first."""
        own = self._slots[slot]
        own.spec, own.is_killed = spec, False
        if own.actor is None:
            self._start_actor(slot)
        else:
            self._start_process(slot)

    def _start_process(self, at: int) -> None:
        slot = self._slots[at]
        assert slot.location is not None
        alike = sum(other.location[0] == slot.location[0] for other in self._slots if other.location is not None)
        self._call_actor("start", at, slot.spec, *self._origin, alike)
        slot.spec = None

    def _signal(self, slot: int, number: int) -> None:
        self._call_actor("signal", slot, number)

    def _kill(self, slot: int) -> None:
        self._slots[slot].is_killed = True
        self._call_actor("kill", slot)

    def _dismiss(self, slot: int) -> None:
        """Kill an actor that does not respond; the next process in its bundle gets a new one."""
        if self._slots[slot].actor is not None:
            self._kill_actor(slot)

    def _collect_answers(self) -> None:
        """Handle the answers of the actors."""
        ready = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0] if self._calls else []
        for answer in ready:
            if answer not in self._calls:
                continue  # another answer has shown that its actor is lost
            what, at = self._calls.pop(answer)
            try:
                self._handle_answer(what, at, ray.get(answer))
            except RayError as error:
                self._report_lost(at, error)

    def _handle_answer(self, what: str, at: int, answer: Any) -> None:
        slot = self._slots[at]
        if what == "where":
            slot.location = tuple(answer)
            if slot.spec is not None:
                self._start_process(at)
            elif all(other.location is not None for other in self._slots):
                self._lines.send({"is": "reserved", "locations": [other.location for other in self._slots]})
        elif what == "listen":
            self._lines.send({"is": "listening", "host": answer[0], "port": answer[1]})
        elif what == "start":
            self._call_actor("receive", at)
            if slot.is_killed:  # the actor may have received the kill before it had a process
                self._call_actor("kill", at)
        elif what == "receive":
            code = answer.pop("code")
            self._lines.send({"is": "output", "slot": at, **answer})
            if code is None:
                self._call_actor("receive", at)
            else:
                self._lines.send({"is": "ended", "slot": at, "code": code})

    def _report_lost(self, at: int, error: RayError) -> None:
        """Report, once, that an actor is lost or cannot start its process."""
        slot = self._slots[at]
        if slot.actor is None:
            return
        self._kill_actor(at)
        unfit = getattr(error, "cause", None) is not None
        self._lines.send({"is": "lost", "slot": at, "why": actor_end_reason(error, slot.location), "unfit": unfit})

    def _kill_actor(self, at: int) -> None:
        """Kill an actor and drop its open calls."""
        slot = self._slots[at]
        ray.kill(slot.actor)
        slot.actor, slot.spec = None, None
        self._calls = {call: asked for call, asked in self._calls.items() if asked[1] != at}


def actor_end_reason(error: RayError, location: Sequence[Any] | None) -> str:
    """Ray's reason for the end of an actor, in a sentence."""
    where = f" on {location[1]} ({location[0]})" if location else ""
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
