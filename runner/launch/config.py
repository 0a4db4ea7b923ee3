"""The options of all launchers: who starts the processes of a job."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.core.errors import EnvironmentProblem
from runner.spec.base import ComponentConfig

# `ray job submit` puts double quotes around words with spaces, and a shell on the cluster reads the line.
SPACE, IN_QUOTES, IN_SHELL = re.compile(r"\s"), re.compile(r'["$`\\]'), re.compile(r"[&;|<>()$`\\'\"*?#!{}\[\]]")
ADDRESS = re.compile(r"(?P<host>[^\s:]+|\[[^\]\s]+\]):(?P<port>\d{1,5})")


class LaunchConfig(ComponentConfig):
    """How the processes of a job are started."""

    group: ClassVar[str] = "launch"
    queued: ClassVar[bool] = False  # whether it runs as a Slurm job and handles Slurm's signals
    devices: int = Field(
        default=1, ge=1, description="Training ranks per machine, one per device; with launch=ray, of the whole job."
    )
    samplers: int = Field(
        default=0, ge=0, description="Number of further devices that only sample; 0 = the ranks sample."
    )
    attempts: int = Field(
        default=1, ge=1, description="Maximum number of attempts; a restart continues from the newest checkpoint."
    )
    max_worker_restarts: int | None = Field(
        default=None, ge=0, description="Maximum restarts of each sampler process; null = 3."
    )

    def sweep_problem(self) -> tuple[str, str] | None:
        """Key and message of the error if a sweep's job uses this launch; None = it can."""
        return None

    @property
    def here(self) -> bool:
        """Whether the processes run on this machine, whose device is then checked before the start."""
        return True

    @property
    def machines(self) -> int:
        """Number of machines with `devices` ranks each, on which the command is typed."""
        return 1

    @property
    def machine(self) -> int:
        """The number of this machine, from 0."""
        return 0

    @property
    def rdzv_address(self) -> tuple[str, int]:
        """Host and port of machine 0, with several machines."""
        raise NotImplementedError(f"launch={self.name} runs on one machine")

    @property
    def world(self) -> int:
        """Number of ranks on all machines."""
        return self.devices * self.machines

    @property
    def alone(self) -> bool:
        """Whether the job is one process."""
        return self.world == 1 and not self.samplers

    def preflight(self) -> None:
        """Raise EnvironmentProblem for what is missing on this machine."""

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = []
        if self.samplers and not job.algorithm.needs_sampler:
            text = f"algorithm={job.algorithm.name} trains on a data set and does not sample; leave it out"
            found.append(("launch.samplers", text))
        if self.samplers % job.sampler.cards():
            text = f"{self.samplers} is not a multiple of the {job.sampler.cards()} devices of a sampler"
            found.append(("launch.samplers", f"{text} (sampler.tensor_parallel_size); set a multiple of it"))
        waits = job.parallelism.deadline_s
        if (self.samplers or job.sampler.served) and waits is not None and job.sampler.patience_s >= waits:
            text = f"must be below parallelism.timeout_s={waits:g}, because the other ranks wait while rank 0"
            found.append(("sampler.timeout_s", f"{text} waits for samplers"))
        if self.max_worker_restarts is not None and not self.samplers:
            text = "has no effect with launch.samplers=0; remove it, or set launch.samplers"
            found.append(("launch.max_worker_restarts", text))
        return found


class MultiNodeConfig(LaunchConfig):
    """A launch whose command is typed on each of several machines."""

    nodes: int = Field(default=1, ge=1, description="Machines; start the same command on each, with its node_rank.")
    node_rank: int | None = Field(
        default=None, ge=0, description="This machine's number, from 0; needed with nodes above 1."
    )
    rdzv_endpoint: str | None = Field(
        default=None, description="HOST:PORT where machine 0 listens; needed with nodes above 1."
    )

    @property
    def machines(self) -> int:
        return self.nodes

    @property
    def machine(self) -> int:
        return self.node_rank or 0

    @property
    def rdzv_address(self) -> tuple[str, int]:
        found = ADDRESS.fullmatch(self.rdzv_endpoint or "")
        assert found is not None  # checked by `problems`
        return found["host"].strip("[]"), int(found["port"])

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return super().problems(job) + self._node_problems(job)

    def _node_problems(self, job: Any) -> list[tuple[str, str]]:
        given = {"node_rank": self.node_rank, "rdzv_endpoint": self.rdzv_endpoint}
        if self.nodes == 1:
            text = "is used only with launch.nodes above 1; leave it out, or set launch.nodes"
            return [(f"launch.{name}", text) for name, value in given.items() if value is not None]
        found = []
        text = f"with launch.nodes={self.nodes} needs launch=ray, which has one launcher for all machines; leave it out"
        given = {"samplers": self.samplers > 0, "attempts": self.attempts > 1}
        found += [(f"launch.{name}", text) for name, is_set in given.items() if is_set]
        if self.node_rank is None or self.node_rank >= self.nodes:
            text = f"must be 0 to {self.nodes - 1} with launch.nodes={self.nodes}, a different number on each machine"
            found.append(("launch.node_rank", text))
        named = ADDRESS.fullmatch(self.rdzv_endpoint or "")
        if named is None or not 0 < int(named["port"]) < 2**16:
            text = "expected HOST:PORT of machine 0, the same on each, e.g. 10.0.0.1:29400"
            found.append(("launch.rdzv_endpoint", text))
        return found


class ExternalLaunchConfig(MultiNodeConfig):
    """A launch by another program, which sets the machine's number and the address of machine 0."""

    nodes: int = Field(default=1, ge=1, description="Number of machines; set by the launcher.")
    node_rank: int | None = Field(default=None, ge=0, description="This machine's number; set by the launcher.")
    rdzv_endpoint: str | None = Field(default=None, description="HOST:PORT of machine 0; set by the launcher.")

    def sweep_problem(self) -> tuple[str, str] | None:
        return "launch", f"{self.name}: the sweep starts its jobs itself; for Slurm type sweep.on=slurm launch=local"

    def _node_problems(self, job: Any) -> list[tuple[str, str]]:
        is_named = self.node_rank is not None or self.rdzv_endpoint is not None
        later = () if is_named else ("launch.node_rank", "launch.rdzv_endpoint")
        return [(key, text) for key, text in super()._node_problems(job) if key not in later]


def submit_command(job: Any) -> str:
    """The `ray job submit` line for a job whose launch.address is a web address."""
    words = sys.argv[2:] if sys.argv[1:2] == ["run"] else sys.argv[1:]
    if words[:1] == ["plan"]:
        return "is the web address of a Ray cluster; run plan needs no cluster, so leave launch.address out"
    is_job = not words or words[0].startswith("-") or "=" in words[0]
    if not is_job or {"-m", "--multirun"} & set(words):
        return "is the web address of a Ray cluster; run this command on one of its nodes, with launch.address=auto"
    words = [word for word in words if not word.lstrip("+").startswith("launch.address=")]
    if not any(word.partition("=")[0] == "--folder" for word in words):
        words += ["--folder", f"~/outputs/{job.name}"]  # Ray removes the folder that it runs in
    if unsafe := [word for word in words if SPACE.search(word) and IN_QUOTES.search(word)]:
        text = "is the web address of a Ray cluster; `ray job submit` cannot pass spaces with shell characters"
        return f"{text}; put the values into a recipe: {shlex.join(unsafe)}"
    words = [shlex.quote(word) if IN_SHELL.search(word) and not SPACE.search(word) else word for word in words]
    submit = ["ray", "job", "submit", "--address", job.launch.address, "--working-dir", ".", "--", "run"]
    return (
        "is the web address of a Ray cluster; from outside the cluster, submit the job. Type\n"
        f"    {shlex.join([*submit, *words, 'launch.address=auto'])}\n"
        "  --folder is the run folder, on storage that all nodes share"
    )


class RayConfig(LaunchConfig):
    """Ray places the processes, on the nodes of a cluster or on this machine."""

    factory: ClassVar[str] = "runner.launch.ray.attempt:attempt"
    name: Literal["ray"] = "ray"
    attempts: int = Field(
        default=3, ge=1, description="Maximum number of attempts; a restart continues from the newest checkpoint."
    )
    address: str | None = Field(
        default=None, description="Address of the Ray cluster: auto or HOST:PORT; null = a local one for this job."
    )

    @property
    def here(self) -> bool:
        return self.address is None

    def preflight(self) -> None:
        """Raise EnvironmentProblem if Ray is not installed or its cluster cannot be reached."""
        # here, because every command reads this module
        from runner.launch.ray.driver_connection import check_reachable, require_ray

        require_ray("launch=ray")
        if self.address is not None:
            check_reachable(self.address)

    def sweep_problem(self) -> tuple[str, str] | None:
        if self.address is None:
            return None
        typed = f"launch=local sweep.on=ray sweep.address={self.address}"
        return "launch.address", f"the sweep assigns devices to its jobs; type {typed}"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.address is None:
            return found
        if self.address.startswith(("http://", "https://")):  # of the cluster's dashboard
            found.append(("launch.address", submit_command(job)))
        elif self.address != "auto" and ADDRESS.fullmatch(self.address) is None:
            text = "expected auto or HOST:PORT, as `ray start --head` prints it; from outside, http://HOST:8265"
            if self.address.startswith("ray://"):
                text = "Ray's client cannot follow a job; type http://HOST:8265, or use a node of the cluster"
            found.append(("launch.address", text))
        if job.device.is_auto:
            text = "Ray needs the device of the nodes; type device=npu, device=cuda or device=cpu"
            found.append(("device", text))
        return found


# Options of Slurm that jobs and sweeps share
Partition = Annotated[str | None, Field(description="Slurm partition; null = the cluster's default.")]
Account = Annotated[str | None, Field(description="Slurm account.")]
Qos = Annotated[str | None, Field(description="Slurm quality of service.")]
Gres = Annotated[
    str | None, Field(description="Slurm's name of the cards (GRES), e.g. gpu:a100 or npu:910b; null = gpu or npu.")
]
Sbatch = Annotated[
    dict[str, str | int | bool],
    Field(description="Further options of sbatch, e.g. {mem: 64G, constraint: a100, exclusive: true}."),
]
SAID_BY_LAUNCH = {
    **dict.fromkeys(
        ("array", "job-name", "output", "error", "open-mode", "signal", "requeue", "chdir"), "launch=slurm"
    ),
    **{name: f"launch.{name}" for name in ("partition", "account", "qos", "gres", "time", "nodes")},
    **{"cpus-per-task": "launch.cpus", "ntasks": "launch.nodes", "ntasks-per-node": "launch.nodes"},
}  # options that launch.sbatch must not set → what sets them


def sbatch_problems(sbatch: Mapping[str, object], elsewhere: Mapping[str, str]) -> Iterator[str]:
    """Errors in further options of sbatch; elsewhere: options that are set otherwise → what sets them."""
    for name, value in sbatch.items():
        if who := elsewhere.get(name.replace("_", "-")):
            yield f"{name} is set by {who}; leave it out"
        if value is False:
            yield f"{name}: false has no effect; leave it out"


class SlurmConfig(ExternalLaunchConfig):
    """The machines of a Slurm job; on a login node, the command submits it."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    queued: ClassVar[bool] = True
    name: Literal["slurm"] = "slurm"
    nodes: int = Field(default=1, ge=1, description="Number of machines to request; inside a Slurm job, Slurm sets it.")
    partition: Partition = None
    account: Account = None
    qos: Qos = None
    gres: Gres = None
    cpus: int | None = Field(
        default=None, ge=1, description="Cores per machine; null = device.threads per device; on cards, the cluster's."
    )
    time: str | int | None = Field(
        default=None, description="Time limit in sbatch's format: 2:00:00, 1-12, minutes; null = the partition's."
    )
    preempt_notice_s: int = Field(
        default=120, ge=1, description="Seconds before the time limit when the job saves and is requeued."
    )
    sbatch: Sbatch = Field(default_factory=dict)
    follow: bool = Field(default=False, description="Wait for the submitted job and return its exit code.")

    def preflight(self) -> None:
        """Raise EnvironmentProblem if this is no Slurm job and sbatch is not installed."""
        if "SLURM_JOB_ID" not in os.environ and shutil.which("sbatch") is None:
            text = "launch=slurm: sbatch is not installed; run the command on a login node, or leave launch=slurm out"
            raise EnvironmentProblem(f"{text}\n  sudo apt-get install slurm-client  # and the cluster's slurm.conf")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        found += [("launch.sbatch", text) for text in sbatch_problems(self.sbatch, SAID_BY_LAUNCH)]
        if self.gres is not None and job.device.is_cpu:
            found.append(("launch.gres", "device=cpu has no cards; leave it out"))
        return found


class LocalConfig(MultiNodeConfig):
    """This process; for several devices, one child process per device."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    name: Literal["local"] = "local"


class TorchrunConfig(ExternalLaunchConfig):
    """Ranks started by torchrun: type the command after torchrun's own options."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    name: Literal["torchrun"] = "torchrun"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.samplers:
            found.append(("launch.samplers", "torchrun starts only ranks; leave it out, or type launch=local"))
        if self.attempts > 1:
            text = "torchrun's processes cannot be restarted from here; leave it out, or type launch=local"
            found.append(("launch.attempts", text))
        return found


COMPONENTS = (LocalConfig, TorchrunConfig, SlurmConfig, RayConfig)
