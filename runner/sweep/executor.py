"""The executor interface: it runs the jobs of a sweep. `executors` has this machine, Ray and Slurm.

a new job ─▶ has_room ─▶ token in state.json ─▶ submit(need, attempt) ─▶ ExecutorJob ─ poll, signal ─▶ exit code
a resume  ─▶ identities from state.json ─▶ adopt ─▶ jobs that continued without their sweep
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

# JSON, with which an executor finds a job again that was submitted to it. `on` (which executor) and the attempt's
# `token` and `note` are always in it: they are on the disk before a job is submitted; what the job adds, after that.
Identity = Mapping[str, Any]
Say = Callable[[str], None]  # a line for the user and for sweep.log
Cards = Sequence[str] | None  # the kinds of card where jobs run; None: not known

LOWER_CARDS = "lower launch.devices or launch.samplers"
LOWER_CORES = "lower device.threads, launch.devices or launch.samplers"
POLL_S = 0.05


class ExecutorJob(Protocol):
    """An attempt of a job that an executor has. None of its methods blocks.

    identity: with which `adopt` finds it again; devices: what it runs on, empty as long as that is not known
    seconds: for how long its process has run, or ran; None while it waits for room
    reason: once it has ended, what the executor knows of why, beside the exit code
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

        Once there is one, nothing of the job is left running, and its devices are free again.
        """
        ...

    def signal(self, number: int) -> None:
        """Send it SIGINT or SIGTERM (save and end), or SIGKILL; one that waits for room is cancelled."""
        ...


class Executor(ABC):
    """Runs jobs; a context manager that releases its resources at the end.

    parallel: number of jobs that run at once, known after `check`
    """

    def __init__(self, options: SweepConfig) -> None:
        self.options = options
        self.needs: list[ResourceRequest] = []
        self.parallel = 0

    def __enter__(self) -> Self:
        """Connect. Raises EnvironmentProblem where it cannot."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:  # noqa: B027
        """Disconnect."""

    @property
    @abstractmethod
    def cards(self) -> Cards:
        """The kinds of card there, for device=auto; None where that is known on the nodes only."""

    @abstractmethod
    def check(self, needs: Iterable[ResourceRequest]) -> None:
        """Take in what the jobs need. Raises SpecError or EnvironmentProblem where one can never start."""

    @abstractmethod
    def describe(self) -> str:
        """What each job gets of what is there: `1 core each, of 2; 2 jobs at once`."""

    @abstractmethod
    def has_room(self, need: ResourceRequest) -> bool:
        """Whether a job may be submitted now."""

    @abstractmethod
    def submit(self, need: ResourceRequest, attempt: JobAttempt) -> ExecutorJob:
        """Submit a job, where there is room. Raises StorageError where it cannot be started at all."""

    @abstractmethod
    def adopt(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, ExecutorJob]:
        """Take over the jobs of an earlier sweep, by index: those that still run or have reported their end.

        All others have ended when this returns; nothing is known of how. Called once, before the first `submit`.
        """

    def poll(self) -> None:  # noqa: B027
        """Exchange news with what runs the jobs; before a turn of polling them. Raises EnvironmentProblem."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What a cluster reports about a job that no longer runs.

    wait_s: how long to wait for a status file that a shared folder may show late
    """

    reason: StopReason | None = None
    wait_s: float = 0.0


class RemoteExecutor(Executor):
    """Runs jobs on other machines, with a wrapper that writes their status (`job_wrapper`).

    Jobs continue when the sweep ends. `version` changes when there may be news of them.
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
        """What is known of a job that neither waits nor runs there; None of one that does, as far as is known."""

    @abstractmethod
    def signal(self, job: RemoteJob, number: int) -> None:
        """Send a job a signal; see `Job.signal`."""

    def is_queued(self, job: RemoteJob) -> bool:
        """Whether a job waits there: what its status file says is then of a start before."""
        return False


class RemoteJob:
    """An attempt of a job, seen through its status file and what the cluster says of it."""

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
        """Whether its status file tells how it ended."""
        return self.status is not None and self.status.ended is not None

    @property
    def is_running(self) -> bool:
        """Whether it has begun, has not ended, and its heartbeat is not too old."""
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
        """Find its end: in its status file, or, where that does not come, in the cluster's words."""
        if gone is None:
            self._gone_since = None
            return
        self._gone_since = self._gone_since or time.monotonic()
        if self.status is not None and self.status.ended is not None:
            self.reason, self.exit_code = self.status.reason or gone.reason, self.status.exit_code
        elif time.monotonic() - self._gone_since >= gone.wait_s:
            self.reason, self.exit_code = gone.reason, -signal.SIGTERM if self.status is None else -signal.SIGKILL


def refuse_elsewhere(left: Mapping[int, Identity], on: str) -> None:
    """Raise EnvironmentProblem for jobs of another kind of executor.

    Only that executor knows whether they still run, and a job must not run twice.
    """
    for place in dict.fromkeys(identity["on"] for identity in left.values() if identity.get("on", on) != on):
        jobs = [str(index) for index, identity in left.items() if identity.get("on") == place]
        which = f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}"
        text = f"{which} may still run with sweep.on={place}; continue with sweep.on={place} first"
        raise EnvironmentProblem(text)


def wait_for_saving(saving: Callable[[], Sequence[int]], seconds: float, say: Say) -> Sequence[int]:
    """Wait for jobs of the sweep before that are saving; those that still are after so many seconds."""
    deadline, is_said = time.monotonic() + seconds, False
    while (left := saving()) and time.monotonic() < deadline:
        if not is_said:
            say(f"waiting for job {', '.join(map(str, left))} of the previous sweep process, which is saving")
            is_said = True
        time.sleep(POLL_S)
    return left


def placement_text(need: ResourceRequest, devices: Sequence[str]) -> str:
    """The devices of a job as text: `core 0,1`, `npu 3`; `node7` where only the machine is known."""
    names = ",".join(devices)
    return names if need.kind == "core" and not all(map(str.isdigit, devices)) else f"{need.kind} {names}".rstrip()


def capacity(needs: Sequence[ResourceRequest], on_nodes: Callable[[str], Sequence[int]]) -> int:
    """How many jobs all nodes hold at once, if they were as small as the smallest of their kind.

    on_nodes: kind of device → how many each node has
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
    """What a job occupies where there are these kinds of card.

    Raises SpecError for device=auto if none is known, and for a job on several machines, or that something else starts.
    """
    if (problem := spec.launch.sweep_problem()) is not None:
        raise SpecError([Problem(*problem)])
    if (nodes := spec.launch.machines) > 1:
        text = f"is {nodes}, but a job of a sweep uses one machine; leave it out"
        raise SpecError([Problem("launch.nodes", text)])
    return ResourceRequest.of_spec(spec, cards)
