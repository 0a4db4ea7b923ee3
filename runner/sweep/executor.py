"""The interface of executors, which run the jobs of a sweep: on this machine, on Ray or on Slurm.

a new job ─▶ has_room ─▶ token in state.json ─▶ submit(need, attempt) ─▶ ExecutorJob ─ poll, signal ─▶ exit code
a resume  ─▶ identities from state.json ─▶ adopt ─▶ jobs that still run
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from runner.core.device_kinds import ResourceRequest
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.sweep.config import SweepConfig
from runner.sweep.job import SILENT_S, JobAttempt, JobStatus, StopReason, heartbeat_age_s, read_status

# JSON with which an executor finds a submitted job again. `on` (the executor) and the attempt's `token` and `note` are
# written to the disk before the job is submitted; the job's own entries after that.
Identity = Mapping[str, Any]
Say = Callable[[str], None]  # a line for the user and for sweep.log
Cards = Sequence[str] | None  # the kinds of card where jobs run; None = unknown

LOWER_CARDS = "lower launch.devices or launch.samplers"
LOWER_CORES = "lower device.threads, launch.devices or launch.samplers"
POLL_S = 0.05


class ExecutorJob(Protocol):
    """A submitted attempt of a job. None of its methods blocks.

    identity: with which `adopt` finds it again; devices: what it runs on, empty until known
    seconds: duration of its process; None while it waits for resources
    reason: after its end, the executor's reason, in addition to the exit code
    """

    @property
    def identity(self) -> Identity: ...

    @property
    def devices(self) -> tuple[str, ...]: ...

    @property
    def seconds(self) -> float | None: ...

    @property
    def reason(self) -> StopReason | None: ...

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it), None while it waits or runs.

        With an exit code, all processes of the job have ended and its devices are free.
        """
        ...

    def signal(self, number: int) -> None:
        """Send it SIGINT or SIGTERM (save and end), or SIGKILL; a waiting job is cancelled."""
        ...


class Executor(ABC):
    """Runs jobs; a context manager that releases its resources at the end.

    parallel: number of concurrent jobs, known after `check`
    """

    def __init__(self, options: SweepConfig) -> None:
        self.options = options
        self.needs: list[ResourceRequest] = []
        self.parallel = 0

    def __enter__(self) -> Self:
        """Connect. Raises EnvironmentProblem if it cannot."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:  # noqa: B027
        """Disconnect."""

    @property
    @abstractmethod
    def cards(self) -> Cards:
        """The kinds of card there, for device=auto; None if only the nodes know."""

    @abstractmethod
    def check(self, needs: Iterable[ResourceRequest]) -> None:
        """Set the jobs' resource requests. Raises SpecError or EnvironmentProblem if a job can never start."""

    @abstractmethod
    def describe(self) -> str:
        """The resources of each job as text: `1 core each, of 2; 2 jobs at once`."""

    @abstractmethod
    def has_room(self, need: ResourceRequest) -> bool:
        """Whether a job may be submitted now."""

    @abstractmethod
    def submit(self, need: ResourceRequest, attempt: JobAttempt) -> ExecutorJob:
        """Submit a job, after `has_room`. Raises StorageError if it cannot be started."""

    @abstractmethod
    def adopt(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, ExecutorJob]:
        """Take over the jobs of an earlier sweep process, by index: those that run or have reported their end.

        All other jobs have ended when this returns, for an unknown reason. Called once, before the first `submit`.
        """

    def poll(self) -> None:  # noqa: B027
        """Exchange messages with the cluster, before jobs are polled. Raises EnvironmentProblem."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What a cluster reports about a job that no longer runs.

    wait_s: how long to wait for the status file, which a shared folder may show late
    """

    reason: StopReason | None = None
    wait_s: float = 0.0


class RemoteExecutor(Executor):
    """Runs jobs on other machines, with a wrapper that writes their status (`job_wrapper`).

    Jobs continue when the sweep ends. version: changes when jobs must be polled again.
    """

    def __init__(self, options: SweepConfig) -> None:
        super().__init__(options)
        self.jobs: list[RemoteJob] = []
        self.version = 0

    def has_room(self, need: ResourceRequest) -> bool:
        return sum(job.exit_code is None for job in self.jobs) < self.parallel

    def add(self, *jobs: RemoteJob) -> None:
        """Follow these jobs."""
        self.jobs = [*(job for job in self.jobs if job.exit_code is None), *jobs]

    @abstractmethod
    def find_end(self, job: RemoteJob) -> JobEnd | None:
        """What is known of a job that no longer waits or runs; None for one that may still do so."""

    @abstractmethod
    def signal(self, job: RemoteJob, number: int) -> None:
        """Send a job a signal; see `ExecutorJob.signal`."""

    def is_queued(self, job: RemoteJob) -> bool:
        """Whether a job waits in the queue; its status file is then from an earlier start."""
        return False


class RemoteJob:
    """An attempt of a job, known by its status file and the cluster's reports."""

    def __init__(self, executor: RemoteExecutor, index: int, identity: Identity) -> None:
        self.index, self.identity = index, identity
        self.token, self._path = str(identity["token"]), Path(identity["note"])
        self.status: JobStatus | None = None
        self.signals: list[int] = []
        self.exit_code: int | None = None
        self.reason: StopReason | None = None
        self._executor, self._version = executor, -1
        self._gone_since: float | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.status is None else self.status.seconds

    @property
    def devices(self) -> tuple[str, ...]:
        return () if self.status is None else self.status.where

    @property
    def has_ended(self) -> bool:
        """Whether its status file has its end."""
        return self.status is not None and self.status.ended is not None

    @property
    def is_running(self) -> bool:
        """Whether it has started, has not ended, and its heartbeat is not too old."""
        return self.status is not None and self.status.ended is None and heartbeat_age_s(self._path) <= SILENT_S

    def read_status(self) -> None:
        """Read its status file."""
        found = read_status(self._path, self.token)
        self.status = None if self._executor.is_queued(self) else found or self.status

    def poll(self) -> int | None:
        if self.exit_code is None and self._executor.version != self._version:
            self._version = self._executor.version
            self.read_status()
            self._record_end(self._executor.find_end(self))
        return self.exit_code

    def signal(self, number: int) -> None:
        if self.exit_code is None:
            self.signals.append(number)
            self._executor.signal(self, number)

    def _record_end(self, gone: JobEnd | None) -> None:
        """Set exit code and reason from the status file or, if it does not come, from the cluster's report."""
        if gone is None:
            self._gone_since = None
            return
        self._gone_since = self._gone_since or time.monotonic()
        if self.status is not None and self.status.ended is not None:
            self.reason, self.exit_code = self.status.reason or gone.reason, self.status.exit_code
        elif time.monotonic() - self._gone_since >= gone.wait_s:
            self.reason, self.exit_code = gone.reason, -signal.SIGTERM if self.status is None else -signal.SIGKILL


def refuse_elsewhere(left: Mapping[int, Identity], on: str) -> None:
    """Raise EnvironmentProblem for jobs of another executor.

    Only that executor knows whether they still run, and a job must not run twice.
    """
    for place in dict.fromkeys(identity["on"] for identity in left.values() if identity.get("on", on) != on):
        jobs = [str(index) for index, identity in left.items() if identity.get("on") == place]
        which = f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}"
        text = f"{which} may still run with sweep.on={place}; continue with sweep.on={place} first"
        raise EnvironmentProblem(text)


def wait_for_saving(saving: Callable[[], Sequence[int]], seconds: float, say: Say) -> Sequence[int]:
    """Wait for saving jobs of the previous sweep process; returns those that still save after the timeout."""
    deadline, is_printed = time.monotonic() + seconds, False
    while (left := saving()) and time.monotonic() < deadline:
        if not is_printed:
            say(f"waiting for job {', '.join(map(str, left))} of the previous sweep process, which is saving")
            is_printed = True
        time.sleep(POLL_S)
    return left


def placement_text(need: ResourceRequest, devices: Sequence[str]) -> str:
    """The devices of a job as text: `core 0,1`, `npu 3`; `node7` if only the machine is known."""
    names = ",".join(devices)
    return names if need.kind == "core" and not all(map(str.isdigit, devices)) else f"{need.kind} {names}".rstrip()


def capacity(needs: Sequence[ResourceRequest], on_nodes: Callable[[str], Sequence[int]]) -> int:
    """Number of concurrent jobs on all nodes, if every job is as small as the smallest of its kind.

    on_nodes: kind of device → number on each node
    """
    least = {need.kind: min(n.count for n in needs if n.kind == need.kind) for need in needs}
    return sum(there // max(count, 1) for kind, count in least.items() for there in on_nodes(kind))


def capacity_text(
    needs: Sequence[ResourceRequest], on_nodes: Callable[[str], Sequence[int]], parallel: int, where: str = ""
) -> str:
    """`1 to 4 NPUs each, of 8 on 2 nodes; 2 jobs at once`"""
    parts = []
    for kind in dict.fromkeys(need.kind for need in needs):
        counts = [need.count for need in needs if need.kind == kind]
        least = "" if min(counts) == max(counts) else f"{min(counts)} to "
        parts.append(f"{least}{ResourceRequest(kind, max(counts))} each, of {sum(on_nodes(kind))}")
    return f"{', '.join(parts)}{where}; {parallel} job{'s' if parallel > 1 else ''} at once"


def request_of(spec: Any, cards: Cards) -> ResourceRequest:
    """The resources of a job on machines with these kinds of card.

    Raises SpecError for device=auto if the cards are unknown, for a job on several machines, and for a launch that
    sweeps do not support.
    """
    if (problem := spec.launch.sweep_problem()) is not None:
        raise SpecError([Problem(*problem)])
    if (nodes := spec.launch.machines) > 1:
        text = f"is {nodes}, but a job of a sweep uses one machine; leave it out"
        raise SpecError([Problem("launch.nodes", text)])
    return ResourceRequest.of_spec(spec, cards)
