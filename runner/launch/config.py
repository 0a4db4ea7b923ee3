"""Who starts the processes of a job."""

import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.core.errors import EnvironmentProblem
from runner.launch.base import ADDRESS, ExternalLaunchConfig, MultiNodeConfig, is_web_address, submit_command
from runner.launch.base import LaunchConfig as LaunchConfig


class RayConfig(LaunchConfig):
    """Processes that Ray places, on the nodes of a cluster or on this machine: an actor stands by each."""

    factory: ClassVar[str] = "runner.launch.ray.attempt:attempt"
    name: Literal["ray"] = "ray"
    attempts: int = Field(
        default=3, ge=1, description="Times that the job may begin: after a lost process it restarts by itself."
    )
    address: str | None = Field(
        default=None, description="Of the Ray cluster: auto or HOST:PORT; null = one on this machine for this job."
    )

    @property
    def here(self) -> bool:
        return self.address is None

    def preflight(self) -> None:
        """Raise EnvironmentProblem where Ray is not installed, or its cluster not there."""
        from runner.launch.ray.driver_connection import (
            check_reachable,  # here, because every command reads this module
            require_ray,
        )

        require_ray("launch=ray")
        if self.address is not None:
            check_reachable(self.address)

    def sweep_problem(self) -> tuple[str, str] | None:
        if self.address is None:
            return None
        typed = f"launch=local sweep.on=ray sweep.address={self.address}"
        return "launch.address", f"the sweep itself gives its jobs their devices; type {typed}"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.address is None:
            return found
        if is_web_address(self.address):
            found.append(("launch.address", submit_command(job)))
        elif self.address != "auto" and ADDRESS.fullmatch(self.address) is None:
            text = "auto or HOST:PORT is expected, as `ray start --head` says it; http://HOST:8265 from elsewhere"
            if self.address.startswith("ray://"):
                text = "Ray's client cannot follow a job; type http://HOST:8265, or type this on a node of the cluster"
            found.append(("launch.address", text))
        if job.device.is_auto:
            text = "what the nodes have is not known here, and Ray wants its name; type device=npu, cuda or cpu"
            found.append(("device", text))
        return found


# Options of Slurm that a job and a sweep have alike
Partition = Annotated[str | None, Field(description="Slurm partition; null = that of the cluster.")]
Account = Annotated[str | None, Field(description="Slurm account.")]
Qos = Annotated[str | None, Field(description="Slurm quality of service.")]
Gres = Annotated[
    str | None, Field(description="What Slurm calls a machine's cards, e.g. gpu:a100 or npu:910b; null = gpu or npu.")
]
Sbatch = Annotated[
    dict[str, str | int | bool],
    Field(description="More options of sbatch: {mem: 64G, constraint: a100, exclusive: true}."),
]
SAID_BY_LAUNCH = {
    **dict.fromkeys(
        ("array", "job-name", "output", "error", "open-mode", "signal", "requeue", "chdir"), "launch=slurm"
    ),
    **{name: f"launch.{name}" for name in ("partition", "account", "qos", "gres", "time", "nodes")},
    **{"cpus-per-task": "launch.cpus", "ntasks": "launch.nodes", "ntasks-per-node": "launch.nodes"},
}  # what launch.sbatch may not say, and where it is said


def sbatch_problems(sbatch: Mapping[str, object], elsewhere: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with more options of sbatch; `elsewhere`: those that are set, and by what."""
    for name, value in sbatch.items():
        if who := elsewhere.get(name.replace("_", "-")):
            yield f"{name} is set by {who}; leave it out"
        if value is False:
            yield f"{name}: false says nothing to sbatch; leave it out"


class SlurmConfig(ExternalLaunchConfig):
    """The machines of a Slurm job: in one, the command joins it; on a login node, it is submitted."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    queued: ClassVar[bool] = True
    name: Literal["slurm"] = "slurm"
    nodes: int = Field(default=1, ge=1, description="Machines to ask for; a Slurm job says itself how many it has.")
    partition: Partition = None
    account: Account = None
    qos: Qos = None
    gres: Gres = None
    cpus: int | None = Field(
        default=None,
        ge=1,
        description="Cores per machine; null = device.threads per device; on cards, the cluster's.",
    )
    time: str | int | None = Field(
        default=None, description="Time limit as sbatch has it: 2:00:00, 1-12, minutes; null = the partition's."
    )
    preempt_notice_s: int = Field(
        default=120, ge=1, description="Seconds before that limit at which the job saves, and goes back into the queue."
    )
    sbatch: Sbatch = Field(default_factory=dict)
    follow: bool = Field(default=False, description="Follow a job that was submitted to its end, and end as it does.")

    def preflight(self) -> None:
        """Raise EnvironmentProblem where there is neither a Slurm job nor a command that submits one."""
        if "SLURM_JOB_ID" not in os.environ and shutil.which("sbatch") is None:
            text = "launch=slurm: sbatch is not here; type the same command on a login node, or leave launch=slurm out"
            raise EnvironmentProblem(f"{text}\n  sudo apt-get install slurm-client  # and the cluster's slurm.conf")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        found += [("launch.sbatch", text) for text in sbatch_problems(self.sbatch, SAID_BY_LAUNCH)]
        if self.gres is not None and job.device.is_cpu:
            found.append(("launch.gres", "device=cpu has no cards; leave it out"))
        return found


class LocalConfig(MultiNodeConfig):
    """This process; for several devices, a process for each that this one starts and watches."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    name: Literal["local"] = "local"


class TorchrunConfig(ExternalLaunchConfig):
    """Ranks that torchrun has started: the command is typed behind it, and has its layout from it."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    name: Literal["torchrun"] = "torchrun"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.samplers:
            found.append(("launch.samplers", "torchrun starts ranks alone; leave it out, or take launch=local"))
        if self.attempts > 1:
            text = "what torchrun ends, nobody here begins again; leave it out, or take launch=local"
            found.append(("launch.attempts", text))
        return found


COMPONENTS = (LocalConfig, TorchrunConfig, SlurmConfig, RayConfig)
