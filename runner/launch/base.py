"""What all launchers share in their config."""

import re
import shlex
import sys
from typing import Any, ClassVar

from pydantic import Field

from runner.spec.base import ComponentConfig

# `ray job submit` puts double quotes around words with spaces, and a shell on the cluster reads the line.
SPACE, IN_QUOTES, IN_SHELL = re.compile(r"\s"), re.compile(r'["$`\\]'), re.compile(r"[&;|<>()$`\\'\"*?#!{}\[\]]")
ADDRESS = re.compile(r"(?P<host>[^\s:]+|\[[^\]\s]+\]):(?P<port>\d{1,5})")


class LaunchConfig(ComponentConfig):
    """How the processes of a job come to be."""

    group: ClassVar[str] = "launch"
    queued: ClassVar[bool] = False  # whether it waits in Slurm's queue, whose signals it obeys
    devices: int = Field(default=1, ge=1, description="Processes that train, one per device; on the CPU, ranks.")
    samplers: int = Field(
        default=0, ge=0, description="Devices beside those that only sample; 0 = the ranks sample on their own."
    )
    attempts: int = Field(
        default=1, ge=1, description="Times that the job may begin: after a lost process it restarts by itself."
    )
    max_worker_restarts: int | None = Field(
        default=None, ge=0, description="Times that a sampler that is lost is restarted; null = 3."
    )

    def sweep_problem(self) -> tuple[str, str] | None:
        """Why a job of a sweep cannot have it: key and message; None = it can."""
        return None

    @property
    def here(self) -> bool:
        """Whether the processes run on this machine, whose device is then checked before the start."""
        return True

    @property
    def machines(self) -> int:
        """Machines on each of which somebody types the command, for `devices` of its own."""
        return 1

    @property
    def machine(self) -> int:
        """The number of this one, from 0."""
        return 0

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of machine 0, of several."""
        raise NotImplementedError(f"launch={self.name} is typed on one machine")

    @property
    def world(self) -> int:
        """Processes that train, on all machines."""
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
            text = f"algorithm={job.algorithm.name} learns from given data and samples nothing; leave it out"
            found.append(("launch.samplers", text))
        if self.samplers % job.sampler.cards():
            text = f"{self.samplers} devices do not divide into samplers of {job.sampler.cards()} each"
            found.append(("launch.samplers", f"{text} (sampler.tensor_parallel_size); set a multiple of it"))
        waits = job.parallelism.deadline_s
        if (self.samplers or job.sampler.served) and waits is not None and job.sampler.patience_s >= waits:
            text = f"the ranks wait {waits:g} s for one another (parallelism.timeout_s), and rank 0 for samplers; less"
            found.append(("sampler.timeout_s", f"{text} than that is expected"))
        if self.max_worker_restarts is not None and not self.samplers:
            text = "has no effect with launch.samplers=0; remove it, or set launch.samplers"
            found.append(("launch.max_worker_restarts", text))
        return found


class MultiNodeConfig(LaunchConfig):
    """What is typed on each of several machines."""

    nodes: int = Field(default=1, ge=1, description="Machines; the same command is typed on each, with its node.")
    node_rank: int | None = Field(
        default=None, ge=0, description="This machine's number, from 0; given where nodes is above 1."
    )
    rdzv_endpoint: str | None = Field(
        default=None, description="HOST:PORT at which machine 0 is found by the others; given where nodes is above 1."
    )

    @property
    def machines(self) -> int:
        return self.nodes

    @property
    def machine(self) -> int:
        return self.node_rank or 0

    @property
    def meeting(self) -> tuple[str, int]:
        found = ADDRESS.fullmatch(self.rdzv_endpoint or "")
        assert found is not None  # `problems` saw to it
        return found["host"].strip("[]"), int(found["port"])

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return super().problems(job) + self._node_problems(job)

    def _node_problems(self, job: Any) -> list[tuple[str, str]]:
        given = {"node_rank": self.node_rank, "rdzv_endpoint": self.rdzv_endpoint}
        if self.nodes == 1:
            text = "is about several machines, and launch.nodes is 1; leave it out, or set launch.nodes"
            return [(f"launch.{name}", text) for name, value in given.items() if value is not None]
        found = []
        text = (
            f"with launch.nodes={self.nodes} is for launch=ray, which has one launcher for all machines; leave it out"
        )
        given = {"samplers": self.samplers > 0, "attempts": self.attempts > 1}
        found += [(f"launch.{name}", text) for name, is_set in given.items() if is_set]
        if self.node_rank is None or self.node_rank >= self.nodes:
            text = f"the machines of launch.nodes={self.nodes} are 0 to {self.nodes - 1}; give each its number"
            found.append(("launch.node_rank", text))
        named = ADDRESS.fullmatch(self.rdzv_endpoint or "")
        if named is None or not 0 < int(named["port"]) < 2**16:
            found.append(
                ("launch.rdzv_endpoint", "machine 0's HOST:PORT is expected, the same on each, e.g. 10.0.0.1:29400")
            )
        return found


class ExternalLaunchConfig(MultiNodeConfig):
    """What something else starts on each machine, and tells the machine's number and machine 0's address."""

    nodes: int = Field(default=1, ge=1, description="Machines; who starts the command on them says how many there are.")
    node_rank: int | None = Field(default=None, ge=0, description="This machine's number; not to be set, it is told.")
    rdzv_endpoint: str | None = Field(default=None, description="HOST:PORT of machine 0; not to be set, it is told.")

    def sweep_problem(self) -> tuple[str, str] | None:
        return "launch", f"{self.name}: the sweep starts its jobs; on Slurm with sweep.on=slurm and launch=local"

    def _node_problems(self, job: Any) -> list[tuple[str, str]]:
        told = self.node_rank is not None or self.rdzv_endpoint is not None
        later = () if told else ("launch.node_rank", "launch.rdzv_endpoint")
        return [(key, text) for key, text in super()._node_problems(job) if key not in later]


def is_web_address(address: str) -> bool:
    """Whether an address is that of a Ray cluster's dashboard."""
    return address.startswith(("http://", "https://"))


def submit_command(job: Any) -> str:
    """The `ray job submit` line for a job whose launch.address is a web address."""
    words = sys.argv[2:] if sys.argv[1:2] == ["run"] else sys.argv[1:]
    if words[:1] == ["plan"]:
        return "is a Ray cluster's web address; run plan needs no cluster, leave launch.address out"
    is_job = not words or words[0].startswith("-") or "=" in words[0]
    if not is_job or {"-m", "--multirun"} & set(words):
        return "is a Ray cluster's web address; type this command on a node of the cluster, with launch.address=auto"
    words = [word for word in words if not word.lstrip("+").startswith("launch.address=")]
    if not any(word.partition("=")[0] == "--folder" for word in words):
        words += ["--folder", f"~/outputs/{job.name}"]  # Ray removes the folder that it runs in
    if unsafe := [word for word in words if SPACE.search(word) and IN_QUOTES.search(word)]:
        text = "is a Ray cluster's web address; `ray job submit` cannot carry spaces beside shell characters"
        return f"{text}; put the values into a recipe: {shlex.join(unsafe)}"
    words = [shlex.quote(word) if IN_SHELL.search(word) and not SPACE.search(word) else word for word in words]
    submit = ["ray", "job", "submit", "--address", job.launch.address, "--working-dir", ".", "--", "run"]
    return (
        "is a Ray cluster's web address; from outside of the cluster, Ray submits the job. Type\n"
        f"    {shlex.join([*submit, *words, 'launch.address=auto'])}\n"
        "  --folder is the run folder, on a disk that all nodes of the cluster share"
    )
