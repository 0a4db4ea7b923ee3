"""The attempts of launch=ray: Ray reserves resources, actors start processes, `Supervisor` watches.

Messages go through the connection to Ray's driver, with a `WorkerProcess` for each process of an actor.

                        ┌─▶ runner.launch.ray.driver_connection ▷ runner.launch.ray.driver ─▶ actor 0 ─▶ rank 0
attempt ─▶ Supervisor ──┤                                                       ├▶ actor 1 ─▶ rank 1 …
                        └◀── what they say, how they end ───────────────────────┴▶ actor N ─▶ sampler 0 …
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

from runner.core.device_kinds import CPU, CUDA
from runner.core.errors import DeadlineExceeded, EnvironmentProblem, Interrupted, RankLost, RunnerError
from runner.core.rank_info import RankInfo
from runner.core.signals import SignalRecorder, StopSignal
from runner.launch.config import RayConfig
from runner.launch.exit_cause import HeartbeatReader, JobFailed, ProcessExit, is_final
from runner.launch.local import run_attempts
from runner.launch.multi_node import LOOPBACK, SAMPLER_HOST
from runner.launch.ray.actor_process import WORKER_SPEC
from runner.launch.ray.driver_connection import ADDRESS, RayConnection, forwarded_env, require_ray
from runner.launch.ray.placement import (
    Bundle,
    BundleLocation,
    bundles,
    free_text,
    placement_table,
    refuse_too_many,
    request_text,
)
from runner.launch.supervisor import Supervisor
from runner.launch.worker_process import WorkerSpec
from runner.run_dir.folder import RunFolder, display_path
from runner.spec.job import JobSpec
from runner.tracker.console import Console

FREE_S = 30.0  # for what somebody else has to become free: an attempt that ended just now gives it back
PATIENCE_S = 2.0  # before that is said
ACTOR_START_S = 120.0  # for the actors to begin, and to answer
POLL_S = 0.1
MEET_S = 60.0  # for an actor to listen
KILL_S = 10.0  # until a killed process is reported; then its actor is killed
SIGKILL = 9


def attempt(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> int:
    """Make attempt `number` at a job in a folder that the caller has locked, and others; returns 0.

    Raises EnvironmentProblem where Ray is not there or has no room, RunnerError.
    """
    require_ray("launch=ray")
    run_attempts(spec, folder, number, lambda now: _run(spec, folder, now))
    return 0


def _run(spec: JobSpec, folder: RunFolder, number: int) -> None:
    with reserve_placement(spec, Console(folder.log).message) as starter:
        Supervisor(spec, folder, number, starter).run()


@contextmanager
def reserve_placement(spec: JobSpec, say: Callable[[str], None]) -> Iterator[RayLauncher]:
    """All bundles of a job, for as long as the block lasts. Raises EnvironmentProblem, Interrupted."""
    starter, stop = RayLauncher(spec, bundles(spec)), StopSignal()
    with stop.handle_signals(), stop.interrupt_immediately():
        starter.__enter__()
    with close_after(starter):
        with stop.handle_signals(), stop.interrupt_immediately():
            say(starter.reserve(say))
        yield starter


@contextmanager
def close_after(link: RayConnection) -> Iterator[None]:
    """End Ray after the block, in bounded time.

    A signal meanwhile does not change how the block has ended, but no other attempt follows it. Raises JobFailed for an
    error that another attempt would follow.
    """
    held = SignalRecorder()
    try:
        try:
            yield
        finally:
            with held.record_signals():
                link.__exit__(None, None, None)
    except RunnerError as error:
        if not held.stop_signals or isinstance(error, Interrupted) or is_final(error):
            raise
        raise JobFailed(str(error), error.exit_code, stopped=True) from error


class RayLauncher(RayConnection):
    """Ray's driver as the `WorkerLauncher` of launch=ray: each process in its bundle.

    taken: where the bundles are; free: what the cluster has left, before they are placed; broken: why Ray is gone
    any more
    """

    def __init__(self, spec: JobSpec, wanted: Sequence[Bundle]) -> None:
        assert isinstance(spec.launch, RayConfig)
        address = spec.launch.address
        own = _local_cluster_resources(spec, wanted) if address is None else {}
        super().__init__("runner.launch.ray.driver", {"address": address, "resources": own})
        self._spec, self._wanted = spec, wanted
        self.locations: list[BundleLocation] = []
        self.free: Mapping[str, float] | None = None
        self.broken = ""
        self._met: list[tuple[str, int]] = []
        self._processes: dict[int, RayWorker] = {}

    def reserve(self, say: Callable[[str], None]) -> str:
        """Wait for the resources; returns the placement as text. Raises EnvironmentProblem, DeadlineExceeded.

        EnvironmentProblem where resources are not free, DeadlineExceeded where actors do not start.
        """
        what = request_text(self._wanted)
        refuse_too_many(self._wanted, self.nodes, self.where)
        brought = forwarded_env(os.environ)
        chosen = [(seat.role, seat.resource, seat.count) for seat in self._wanted]
        self.send(do="reserve", seats=chosen, kind=self._spec.device.kind.name, carried=brought, folder=os.getcwd())
        begin, told = time.monotonic(), False
        while not self.locations:
            self.receive_events(POLL_S)
            waited = time.monotonic() - begin
            if self.free is not None and waited > PATIENCE_S and not told:
                told = True
                say(f"waiting  at most {FREE_S:g} s: {self._shortage()}")
            if self.free is not None and waited > FREE_S:
                raise EnvironmentProblem(f"{self._shortage()}; `ray status` lists who uses the rest: try again later")
            if waited > FREE_S + ACTOR_START_S:
                raise DeadlineExceeded(
                    f"{self.where}: {what} are reserved, but the actors did not start within {ACTOR_START_S:g} s"
                )
        lines = [
            f"ray      {self.where}: {what} in one placement group",
            *placement_table(self._wanted, self.locations),
        ]
        if self._spec.launch.here and (named := os.environ.get(ADDRESS)):
            lines.append(f"note     {ADDRESS}={named} is not used without launch.address=auto")
        if not self._spec.launch.here:
            lines.append(f"env      passed on from here: {', '.join(sorted(brought)) or 'nothing'}")
        return "\n".join(lines)

    def local_ranks(self) -> list[RankInfo]:
        """Each rank sees its own device alone, as if it were on a machine of its own."""
        return [RankInfo(rank, self._spec.launch.world, 0, 1) for rank in range(self._spec.launch.world)]

    def rendezvous_address(self) -> tuple[str, int]:
        """Address and port at which rank 0's actor listens. Raises EnvironmentProblem where it is silent."""
        self.send(do="meet", seat=0, host=LOOPBACK if self._is_one_node() else self.locations[0].node)
        self.wait_for(lambda: bool(self._met), MEET_S)
        return self._met.pop()

    def start(self, order: WorkerSpec) -> RayWorker:
        """Start a process in its bundle, whose last one has ended."""
        seat = [(one.role, one.index) for one in self._wanted].index((order.role, order.index))
        more = {}
        if not self._is_one_node():
            more[SAMPLER_HOST] = self.locations[seat].node
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            more["GLOO_SOCKET_IFNAME"] = "lo"  # a host's own name need not lead anywhere, as in many containers
        order = replace(order, environment={**more, **order.environment})
        process = self._processes[seat] = RayWorker(self, seat, order)
        self.send(do="start", seat=seat, order=WORKER_SPEC.dump_python(order, mode="json"))
        return process

    def poll(self, wait_s: float = 0.0) -> None:
        """Take in what is said of the processes; where the driver is gone, all of them are."""
        try:
            if not self.broken:
                self.receive_events(wait_s)
        except (EnvironmentProblem, RankLost) as error:
            self.broken = str(error)
            for process in self._processes.values():
                process.mark_lost(self.broken)

    def _handle_event(self, event: Mapping[str, Any]) -> None:
        kind = event["is"]
        if kind == "reserved":
            self.locations = [BundleLocation(node, host, tuple(devices)) for node, host, devices in event["taken"]]
        elif kind in ("waiting", "placed"):
            self.free = event.get("free")
        elif kind == "met":
            self._met.append((event["host"], event["port"]))
        elif (process := self._processes.get(event["seat"])) is None:
            problem = EnvironmentProblem if event["unfit"] else RankLost
            raise problem(f"{self.where}: {event['why']}")  # an actor, before anything was started
        elif kind == "said":
            process.receive_output(event)
        elif kind == "ended":
            process.code = event["code"]
        else:
            process.mark_lost(event["why"])

    def _is_one_node(self) -> bool:
        return len({place.node for place in self.locations}) == 1

    def _shortage(self) -> str:
        """What is missing of what is wanted."""
        has = free_text(self._wanted, self.nodes, self.free or {})
        return f"the job needs {request_text(self._wanted)}, but {self.where} has {has} free"


def _local_cluster_resources(spec: JobSpec, wanted: Sequence[Bundle]) -> dict[str, Any]:
    """Resources of a local cluster: what the job needs. Raises EnvironmentProblem where they are missing."""
    count = sum(seat.count for seat in wanted)
    kind, cards = spec.device.kind, spec.device.visible()
    if kind is CPU or cards is None:  # which any number of processes share
        return {"num_cpus": count, "num_gpus": 0}
    refuse_too_many(wanted, [{kind.resource: len(cards)}], "this machine")
    if kind is CUDA:
        return {"num_cpus": 1, "num_gpus": count}
    return {"num_cpus": 1, "num_gpus": 0, "resources": {kind.resource: count}}


class RayWorker:
    """A process on another node, or below an actor on this one; see `launch.worker_process.WorkerProcess`."""

    def __init__(self, link: RayLauncher, seat: int, order: WorkerSpec) -> None:
        self.order, self.heartbeat = order, HeartbeatReader()
        self.code: int | None = None
        self._link, self._seat = link, seat
        self._status, self._lost, self._killed = "", "", False

    def is_running(self) -> bool:
        """Whether it still does. Once it does not, all its output was received."""
        self._link.poll()
        return self.code is None

    def signal(self, number: int) -> None:
        """Send the process, and nothing that it started, a signal."""
        if self.is_running():
            self._link.send(do="signal", seat=self._seat, number=number)

    def kill(self) -> None:
        """End it and what it started."""
        if self.is_running():
            self._killed = True
            self._link.send(do="kill", seat=self._seat)

    def wait_for_exit(self) -> ProcessExit:
        """How it ended; waits for one that was killed, and no longer than its actor answers."""
        end = time.monotonic() + KILL_S
        while self.code is None and time.monotonic() < end:
            self._link.poll(0.1)
        if self.code is None:
            self._link.send(do="dismiss", seat=self._seat)
            self.mark_lost("its actor does not respond")
        assert self.code is not None
        log = display_path(self.order.folder.log)
        return ProcessExit(self.order.name, self.code, self.heartbeat.report, log, self._killed, self._lost)

    def status(self) -> str:
        """What the process does, one of psutil.STATUS_*, as its actor said last."""
        self._link.poll()
        return self._status

    def receive_output(self, said: Mapping[str, str]) -> None:
        """What it said: to its launcher, to the user."""
        self._status = said["status"]
        if said["pipe"]:
            self.heartbeat.feed(said["pipe"].encode("latin-1"))
        _print_bytes(sys.stdout, said["out"])
        _print_bytes(sys.stderr, said["err"])

    def mark_lost(self, why: str) -> None:
        """Mark it as lost; with its actor it has ended."""
        if self.code is None:
            self.code, self._lost = -SIGKILL, why


def _print_bytes(screen: TextIO, latin: str) -> None:
    """Print bytes as they came."""
    if latin:
        screen.buffer.write(latin.encode("latin-1"))
        screen.flush()
