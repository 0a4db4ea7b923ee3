"""Jobs on a Ray cluster, or on a local cluster of the sweep: each is an actor with its resources.

Ray itself is in another process, `ray_executor_driver`; the end of a job is read from its status file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Self

from runner.core.device_kinds import CORE, ResourceRequest, card_kinds, kind_of
from runner.core.errors import EnvironmentProblem
from runner.launch.ray.driver_connection import RayConnection, actor_options, forwarded_env, require_ray
from runner.sweep import executor as base
from runner.sweep.config import SweepConfig
from runner.sweep.executor import Identity, JobEnd, RemoteJob, Say
from runner.sweep.job import JobAttempt, StopReason
from runner.sweep.local_executor import available_devices

WRAPPER = (sys.executable, "-P", "-m", "runner.sweep.job_wrapper")
READ_S = 0.2  # between two reads of a job's status
ACTOR = "run-"  # begins the name of an actor; the token of its job follows
LATE_S = 3.0  # a shared folder may show the end of a job after Ray has
ANSWER_S = 60.0  # for the driver to report whether Ray knows a job


class RayExecutor(RayConnection, base.RemoteExecutor):
    """Runs jobs on the cluster at `sweep.address`, or on a local cluster."""

    def __init__(self, options: SweepConfig) -> None:
        base.RemoteExecutor.__init__(self, options)
        # resources of a local cluster
        there = {kind_of(name).resource: len(available_devices(name)) for name in (CORE, *card_kinds())}
        counted = {"num_cpus": there.pop("CPU"), "num_gpus": there.pop("GPU")}
        here = {**counted, "resources": {resource: count for resource, count in there.items() if count}}
        asked = {"address": options.address, "resources": here, "grace_s": options.grace_s}
        RayConnection.__init__(self, "runner.sweep.ray_executor_driver", asked, options.grace_s)
        self._found: set[str] = set()  # tokens of jobs that have an actor
        self._lost: dict[str, str] = {}  # token → why its actor has ended

    def __enter__(self) -> Self:
        require_ray("sweep.on=ray")
        return super().__enter__()

    @property
    def cards(self) -> tuple[str, ...]:
        return tuple(kind for kind in card_kinds() if sum(self._on_nodes(kind)))

    def check(self, needs: Iterable[ResourceRequest]) -> None:
        self.needs = list(needs)
        for need in self.needs:
            self._refuse(need)
        self.parallel = min(self.options.parallel or base.capacity(self.needs, self._on_nodes), len(self.needs))

    def describe(self) -> str:
        return base.capacity_text(self.needs, self._on_nodes, self.parallel, f" on {self._cluster()}")

    def submit(self, need: ResourceRequest, attempt: JobAttempt) -> RemoteJob:
        attempt = replace(attempt, environment=forwarded_env(os.environ))
        job = RemoteJob(self, attempt.index, {"token": attempt.token, "note": attempt.note})
        request = {
            "token": job.token,
            "name": ACTOR + job.token,
            "resources": actor_options(kind_of(need.kind).resource, need.count),
            "wrapper": WRAPPER,
        }
        self.send(do="start", **request, attempt=asdict(attempt))
        self.add(job)
        return job

    def adopt(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, RemoteJob]:
        """Jobs with an actor continue. Jobs that lost it are saving: wait for them."""
        jobs = {index: RemoteJob(self, index, identity) for index, identity in left.items() if "token" in identity}
        for job in jobs.values():
            self.send(do="find", token=job.token, name=ACTOR + job.token)
        tokens = {job.token for job in jobs.values()}
        self.wait_for(lambda: tokens <= self._found | self._lost.keys(), ANSWER_S)
        lost = {index: job for index, job in jobs.items() if job.token in self._lost}

        def saving() -> list[int]:
            for job in lost.values():
                job.read_status()
            return [index for index, job in lost.items() if job.is_running]

        if left_over := base.wait_for_saving(saving, grace_s + LATE_S, say):
            # a wrapper without an actor would have ended its job by now
            text = f"job {', '.join(map(str, left_over))} runs, but {self._cluster()} does not know it"
            raise EnvironmentProblem(f"{text}; set sweep.address to the cluster where the sweep started")
        known = {index: job for index, job in jobs.items() if index not in lost or job.has_ended}
        self.add(*known.values())
        return known

    def poll(self) -> None:
        self.receive_events()
        self.version = int(time.monotonic() / READ_S)

    def find_end(self, job: RemoteJob) -> JobEnd | None:
        if job.has_ended:
            return JobEnd()
        if job.token not in self._lost or job.is_running:
            return None
        why = " ".join(self._lost[job.token].split())
        if job.status is not None:
            return JobEnd(StopReason(f"lost with its node, or stopped by Ray: {why}".rstrip(": "), "killed"), LATE_S)
        return JobEnd(None if job.signals else StopReason(f"could not be started on Ray: {why}", "failed"), LATE_S)

    def signal(self, job: RemoteJob, number: int) -> None:
        self.send(do="signal", token=job.token, number=number)

    def _handle_event(self, event: Mapping[str, Any]) -> None:
        if event["is"] == "found":
            self._found.add(event["token"])
        else:
            self._lost[event["token"]] = event["why"]

    def _on_nodes(self, kind: str) -> list[int]:
        return [int(node.get(kind_of(kind).resource, 0)) for node in self.nodes]

    def _cluster(self) -> str:
        count, address = len(self.nodes), self.options.address
        where = f"at {address}" if address else "on this machine"
        return f"{count} node{'s' if count > 1 else ''} of Ray {where}"

    def _refuse(self, need: ResourceRequest) -> None:
        """A job runs on one node; Ray would wait forever for a node that is large enough."""
        there = self._on_nodes(need.kind)
        most = max(there, default=0)
        if need.count > most:
            word = kind_of(need.kind).word + "s"
            has = f"at most {most} {word} per node, {sum(there)} in total" if most else f"no {word}"
            lower = base.LOWER_CORES if need.kind == "core" else base.LOWER_CARDS
            advice = lower if most else "`ray status` lists the resources"
            raise EnvironmentProblem(f"a job needs {need} on one node; {self._cluster()}: {has}; {advice}")
