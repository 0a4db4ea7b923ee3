"""The attempts of launch=ray: Ray reserves resources, actors start processes, `Supervisor` watches.

Messages go through the connection to Ray's driver; each actor's process is a `WorkerProcess`.

                        ┌─▶ runner.launch.ray.driver_connection ▷ runner.launch.ray.driver ─▶ actor 0 ─▶ rank 0
attempt ─▶ Supervisor ──┤                                                       ├▶ actor 1 ─▶ rank 1 …
                        └◀── heartbeats, output, exit codes ────────────────────┴▶ actor N ─▶ sampler 0 …
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
from runner.launch.exit_cause import JobFailed, ProcessExit, is_final
from runner.launch.heartbeat import HeartbeatReader
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

FREE_S = 30.0  # for resources to become free: an attempt that just ended releases its own
PATIENCE_S = 2.0  # until the message that it waits
ACTOR_START_S = 120.0  # for the actors to start and respond
POLL_S = 0.1
LISTEN_S = 60.0  # for an actor to listen
KILL_S = 10.0  # until a killed process is reported; then its actor is killed
SIGKILL = 9


def attempt(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> int:
    """Run attempt `number` in a folder that the caller has locked, and further attempts; returns 0.

    Raises EnvironmentProblem if Ray is missing or has too few resources, RunnerError.
    """
    require_ray("launch=ray")
    run_attempts(spec, folder, number, lambda now: _run(spec, folder, now))
    return 0


def _run(spec: JobSpec, folder: RunFolder, number: int) -> None:
    with reserve_placement(spec, Console(folder.log).message) as launcher:
        Supervisor(spec, folder, number, launcher).run()


@contextmanager
def reserve_placement(spec: JobSpec, say: Callable[[str], None]) -> Iterator[RayLauncher]:
    """Reserve all bundles of a job for the block. Raises EnvironmentProblem, Interrupted."""
    launcher, stop = RayLauncher(spec, bundles(spec)), StopSignal()
    with stop.handle_signals(), stop.interrupt_immediately():
        launcher.__enter__()
    with close_after(launcher):
        with stop.handle_signals(), stop.interrupt_immediately():
            say(launcher.reserve(say))
        yield launcher


@contextmanager
def close_after(launcher: RayConnection) -> Iterator[None]:
    """Shut Ray down after the block, in bounded time.

    A signal during the shutdown does not change the block's error, but prevents another attempt: an error that allows
    one becomes a JobFailed that does not.
    """
    held = SignalRecorder()
    try:
        try:
            yield
        finally:
            with held.record_signals():
                launcher.__exit__(None, None, None)
    except RunnerError as error:
        if not held.stop_signals or isinstance(error, Interrupted) or is_final(error):
            raise
        raise JobFailed(str(error), error.exit_code, stopped=True) from error


class RayLauncher(RayConnection):
    """Ray's driver as the `WorkerLauncher` of launch=ray: each process in its bundle.

    locations: where the bundles are; free: the cluster's free resources until they are placed; broken: why Ray has
    ended
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
        self._addresses: list[tuple[str, int]] = []
        self._processes: dict[int, RayWorker] = {}

    def reserve(self, say: Callable[[str], None]) -> str:
        """Wait for the resources; returns the placement as text. Raises EnvironmentProblem, DeadlineExceeded.

        EnvironmentProblem if resources are not free, DeadlineExceeded if actors do not start.
        """
        what = request_text(self._wanted)
        refuse_too_many(self._wanted, self.nodes, self.where)
        forwarded = forwarded_env(os.environ)
        chosen = [(bundle.role, bundle.resource, bundle.count) for bundle in self._wanted]
        self.send(do="reserve", slots=chosen, kind=self._spec.device.kind.name, forwarded=forwarded, folder=os.getcwd())
        begin, is_printed = time.monotonic(), False
        while not self.locations:
            self.receive_events(POLL_S)
            waited = time.monotonic() - begin
            if self.free is not None and waited > PATIENCE_S and not is_printed:
                is_printed = True
                say(f"waiting  at most {FREE_S:g} s: {self._shortage()}")
            if self.free is not None and waited > FREE_S:
                raise EnvironmentProblem(f"{self._shortage()}; `ray status` lists what is in use: try again later")
            if waited > FREE_S + ACTOR_START_S:
                text = f"{what} are reserved, but the actors did not start within {ACTOR_START_S:g} s"
                raise DeadlineExceeded(f"{self.where}: {text}")
        lines = [
            f"ray      {self.where}: {what} in one placement group",
            *placement_table(self._wanted, self.locations),
        ]
        if self._spec.launch.here and (named := os.environ.get(ADDRESS)):
            lines.append(f"note     {ADDRESS}={named} is not used without launch.address=auto")
        if not self._spec.launch.here:
            lines.append(f"env      passed on from here: {', '.join(sorted(forwarded)) or 'nothing'}")
        return "\n".join(lines)

    def local_ranks(self) -> list[RankInfo]:
        """All ranks. Each sees only its own device, as if it were alone on its machine."""
        return [RankInfo(rank, self._spec.launch.world, 0, 1) for rank in range(self._spec.launch.world)]

    def rendezvous_address(self) -> tuple[str, int]:
        """Address and port at which rank 0's actor listens. Raises EnvironmentProblem if it does not respond."""
        self.send(do="listen", slot=0, host=LOOPBACK if self._is_one_node() else self.locations[0].node)
        self.wait_for(lambda: bool(self._addresses), LISTEN_S)
        return self._addresses.pop()

    def start(self, worker: WorkerSpec) -> RayWorker:
        """Start a process in its bundle; an earlier one there has ended."""
        slot = [(one.role, one.index) for one in self._wanted].index((worker.role, worker.index))
        more = {}
        if not self._is_one_node():
            more[SAMPLER_HOST] = self.locations[slot].node
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            more["GLOO_SOCKET_IFNAME"] = "lo"  # in many containers the host name has no address
        worker = replace(worker, environment={**more, **worker.environment})
        process = self._processes[slot] = RayWorker(self, slot, worker)
        self.send(do="start", slot=slot, spec=WORKER_SPEC.dump_python(worker, mode="json"))
        return process

    def poll(self, wait_s: float = 0.0) -> None:
        """Receive events; if the driver has ended, all processes are lost."""
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
            self.locations = [BundleLocation(node, host, tuple(devices)) for node, host, devices in event["locations"]]
        elif kind in ("waiting", "placed"):
            self.free = event.get("free")
        elif kind == "listening":
            self._addresses.append((event["host"], event["port"]))
        elif (process := self._processes.get(event["slot"])) is None:
            problem = EnvironmentProblem if event["unfit"] else RankLost
            raise problem(f"{self.where}: {event['why']}")  # an actor that has started nothing
        elif kind == "output":
            process.receive_output(event)
        elif kind == "ended":
            process.code = event["code"]
        else:
            process.mark_lost(event["why"])

    def _is_one_node(self) -> bool:
        return len({place.node for place in self.locations}) == 1

    def _shortage(self) -> str:
        """The requested and the free resources, as text."""
        has = free_text(self._wanted, self.nodes, self.free or {})
        return f"the job needs {request_text(self._wanted)}, but {self.where} has {has} free"


def _local_cluster_resources(spec: JobSpec, wanted: Sequence[Bundle]) -> dict[str, Any]:
    """Resources of a local cluster for the job. Raises EnvironmentProblem if the machine has too few."""
    count = sum(bundle.count for bundle in wanted)
    kind, cards = spec.device.kind, spec.device.visible()
    if kind is CPU or cards is None:  # any number of processes share a CPU
        return {"num_cpus": count, "num_gpus": 0}
    refuse_too_many(wanted, [{kind.resource: len(cards)}], "this machine")
    if kind is CUDA:
        return {"num_cpus": 1, "num_gpus": count}
    return {"num_cpus": 1, "num_gpus": 0, "resources": {kind.resource: count}}


class RayWorker:
    """A process that an actor has started on its node; see `launch.worker_process.WorkerProcess`."""

    def __init__(self, launcher: RayLauncher, slot: int, spec: WorkerSpec) -> None:
        self.spec, self.heartbeat = spec, HeartbeatReader()
        self.code: int | None = None
        self._launcher, self._slot = launcher, slot
        self._status, self._lost, self._killed = "", "", False

    def is_running(self) -> bool:
        """Whether it still runs. Once False, all its output was received."""
        self._launcher.poll()
        return self.code is None

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.is_running():
            self._launcher.send(do="signal", slot=self._slot, number=number)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.is_running():
            self._killed = True
            self._launcher.send(do="kill", slot=self._slot)

    def wait_for_exit(self) -> ProcessExit:
        """How it ended; waits for a killed process at most KILL_S."""
        end = time.monotonic() + KILL_S
        while self.code is None and time.monotonic() < end:
            self._launcher.poll(0.1)
        if self.code is None:
            self._launcher.send(do="dismiss", slot=self._slot)
            self.mark_lost("its actor does not respond")
        assert self.code is not None
        log = display_path(self.spec.folder.log)
        return ProcessExit(self.spec.name, self.code, self.heartbeat.report, log, self._killed, self._lost)

    def status(self) -> str:
        """The state of the process, one of psutil.STATUS_*, as last reported."""
        self._launcher.poll()
        return self._status

    def receive_output(self, event: Mapping[str, str]) -> None:
        """Handle the process's messages, and print its output."""
        self._status = event["status"]
        if event["pipe"]:
            self.heartbeat.feed(event["pipe"].encode("latin-1"))
        _print_bytes(sys.stdout, event["out"])
        _print_bytes(sys.stderr, event["err"])

    def mark_lost(self, why: str) -> None:
        """Mark the process as ended because its actor, or the driver, is lost."""
        if self.code is None:
            self.code, self._lost = -SIGKILL, why


def _print_bytes(screen: TextIO, latin: str) -> None:
    """Print bytes unchanged."""
    if latin:
        screen.buffer.write(latin.encode("latin-1"))
        screen.flush()
