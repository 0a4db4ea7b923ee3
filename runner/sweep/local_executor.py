"""Jobs on this machine: child processes, each with its own cores, GPUs or NPUs.

CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES assign cards (and limit them, where the user has set
them); cores are assigned by affinity, so that jobs do not compete for them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from runner.core.device_kinds import CORE, ResourceRequest, card_kinds, kind_of
from runner.core.device_kinds import present_cards as present_cards
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.core.subprocess import Identity as ProcessIdentity
from runner.core.subprocess import process_identity
from runner.sweep import executor as base
from runner.sweep.config import SweepConfig
from runner.sweep.executor import POLL_S, Executor, ExecutorJob, Identity, Say
from runner.sweep.job import JobAttempt
from runner.sweep.job_wrapper import JobProcess


def available_devices(kind: str) -> tuple[str, ...]:
    """The cores or cards that this process may use, by their names in its environment."""
    cores = map(str, sorted(os.sched_getaffinity(0)))
    return tuple(cores) if kind == CORE else present_cards(kind_of(kind))


def cards_here() -> tuple[str, ...]:
    """The kinds of card that this machine has."""
    return tuple(kind for kind in card_kinds() if available_devices(kind))


def visible_devices_env(need: ResourceRequest, devices: tuple[str, ...]) -> dict[str, str]:
    """The variable that limits a job to its cards."""
    variable = kind_of(need.kind).visible
    return {variable: ",".join(devices)} if variable else {}


def _refuse(need: ResourceRequest, there: tuple[str, ...]) -> None:
    if need.count <= len(there):
        return
    wants = f"a job needs {need}"
    if need.kind == "core":
        raise EnvironmentProblem(f"{wants}, but this machine has {len(there)}; {base.LOWER_CORES}")
    kind = kind_of(need.kind)
    listed = os.environ.get(kind.visible or "")
    why = f"those of {kind.nodes}" if listed is None else f"{kind.visible}={listed}"
    raise EnvironmentProblem(f"{wants}, but {len(there)} can be used here ({why}); {base.LOWER_CARDS}")


class LocalExecutor(Executor):
    """Runs jobs on this machine. With more concurrent jobs than cores, jobs share the cores."""

    def __init__(self, options: SweepConfig) -> None:
        super().__init__(options)
        self._all: dict[str, tuple[str, ...]] = {}
        self._free: dict[str, list[str]] = {}
        self._shared = False
        self._held = 0

    @property
    def cards(self) -> tuple[str, ...]:
        return cards_here()

    def check(self, needs: Iterable[ResourceRequest]) -> None:
        self.needs, limit = list(needs), self.options.parallel
        kinds: dict[str, None] = dict.fromkeys(need.kind for need in self.needs)
        self._all = {kind: available_devices(kind) for kind in kinds}
        for need in self.needs:
            _refuse(need, self._all[need.kind])
        fit = base.capacity(self.needs, self._on_nodes)
        self._shared = limit is not None and limit > fit
        if self._shared and kinds.keys() - {"core"}:
            there = ", ".join(f"{len(ids)} {kind_of(kind).word}(s)" for kind, ids in self._all.items())
            raise SpecError([Problem("sweep.parallel", f"{limit} jobs do not fit together: this machine has {there}")])
        self.parallel = min(limit or fit, len(self.needs))
        self._free = {kind: list(ids) for kind, ids in self._all.items()}

    def describe(self) -> str:
        text = base.capacity_text(self.needs, self._on_nodes, self.parallel)
        return text + (", which share the cores" if self._shared else "")

    def has_room(self, need: ResourceRequest) -> bool:
        return self._held < self.parallel and (self._shared or len(self._free[need.kind]) >= need.count)

    def acquire(self, need: ResourceRequest) -> tuple[str, ...] | None:
        """Devices for a job; None if there are too few free ones."""
        if not self.has_room(need):
            return None
        self._held += 1
        if self._shared:
            return self._all["core"]
        free = self._free[need.kind]
        taken, self._free[need.kind] = free[: need.count], free[need.count :]
        return tuple(taken)

    def release(self, need: ResourceRequest, devices: tuple[str, ...]) -> None:
        """Release a job's devices."""
        self._held -= 1
        if not self._shared:
            order = self._all[need.kind].index
            self._free[need.kind] = sorted([*self._free[need.kind], *devices], key=order)

    def submit(self, need: ResourceRequest, attempt: JobAttempt) -> ExecutorJob:
        return LocalJob(self, need, attempt)

    def _on_nodes(self, kind: str) -> Sequence[int]:
        return [len(self._all[kind])]

    def adopt(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, ExecutorJob]:
        """None of them continues: they got SIGTERM when their sweep ended. Wait for them, then kill them."""
        known = {index: (job["pid"], job["started"]) for index, job in left.items() if "pid" in job}

        def alive() -> list[int]:
            return [index for index, process in known.items() if is_alive(process)]

        if base.wait_for_saving(alive, grace_s, say):
            while indices := alive():
                for index in indices:
                    with suppress(ProcessLookupError):
                        os.killpg(known[index][0], signal.SIGKILL)
                time.sleep(POLL_S)
        return {}


class LocalJob(JobProcess):
    """A job's process on this machine and its devices."""

    reason = None  # the exit code is enough

    def __init__(self, executor: LocalExecutor, need: ResourceRequest, attempt: JobAttempt) -> None:
        devices = executor.acquire(need)
        assert devices is not None, "the scheduler calls has_room first"
        self._executor, self._need, self.devices = executor, need, devices
        self._began, self._holds = time.monotonic(), True
        super().__init__(attempt, visible_devices_env(need, devices), devices if need.kind == "core" else ())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None and self._holds:
            self._holds = False
            self._executor.release(self._need, self.devices)
        return code


def is_alive(process: ProcessIdentity) -> bool:
    """Whether the process with this number and start time still runs."""
    return process_identity(process[0]) == tuple(process)
