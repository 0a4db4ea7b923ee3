"""Who starts the processes of a job."""

import re
from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig

ADDRESS = re.compile(r"(?P<host>[^\s:]+|\[[^\]\s]+\]):(?P<port>\d{1,5})")
SAID_BY_LAUNCH = {
    **dict.fromkeys(
        ("array", "job-name", "output", "error", "open-mode", "signal", "requeue", "chdir"), "launch=slurm"
    ),
    **{name: f"launch.{name}" for name in ("partition", "account", "qos", "gres", "time", "nodes")},
    **{"cpus-per-task": "launch.cpus", "ntasks": "launch.nodes", "ntasks-per-node": "launch.nodes"},
}  # what launch.sbatch may not say, and where it is said


class LaunchConfig(ComponentConfig):
    """How the processes of a job come to be."""

    group: ClassVar[str] = "launch"
    devices: int = Field(default=1, ge=1, description="Processes that train, one per device; on the CPU, ranks.")
    samplers: int = Field(
        default=0, ge=0, description="Devices beside those that only sample; 0 = the ranks sample on their own."
    )
    attempts: int = Field(
        default=1, ge=1, description="Times that the job may begin: after a lost process it goes on by itself."
    )
    replacements: int | None = Field(
        default=None, ge=0, description="Times that a sampler that is lost is started anew; null = 3."
    )

    @property
    def here(self) -> bool:
        """Whether the processes run on this machine, whose device is looked at before; else each looks at its own."""
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

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = []
        if self.samplers and not job.algorithm.samples:
            text = f"algorithm={job.algorithm.name} learns from given data and samples nothing; leave it out"
            found.append(("launch.samplers", text))
        if self.samplers % job.sampler.cards():
            text = f"{self.samplers} devices do not divide into samplers of {job.sampler.cards()} each"
            found.append(("launch.samplers", f"{text} (sampler.tp); set a multiple of it"))
        waits = getattr(job.parallelism, "timeout_s", None)
        if (self.samplers or job.sampler.served) and waits is not None and job.sampler.patience_s >= waits:
            text = f"the ranks wait {waits:g} s for one another (parallelism.timeout_s), and rank 0 for samplers; less"
            found.append(("sampler.timeout_s", f"{text} than that is expected"))
        if self.replacements is not None and not self.samplers:
            text = "is about samplers of their own, and launch.samplers is 0; leave it out, or set launch.samplers"
            found.append(("launch.replacements", text))
        return found


class MachinesConfig(LaunchConfig):
    """What is typed on each of several machines."""

    nodes: int = Field(default=1, ge=1, description="Machines; the same command is typed on each, with its node.")
    node: int | None = Field(
        default=None, ge=0, description="This machine's number, from 0; given where nodes is above 1."
    )
    address: str | None = Field(
        default=None, description="HOST:PORT at which machine 0 is found by the others; given where nodes is above 1."
    )

    @property
    def machines(self) -> int:
        return self.nodes

    @property
    def machine(self) -> int:
        return self.node or 0

    @property
    def meeting(self) -> tuple[str, int]:
        found = ADDRESS.fullmatch(self.address or "")
        assert found is not None  # `problems` saw to it
        return found["host"].strip("[]"), int(found["port"])

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return super().problems(job) + self._about_machines()

    def _about_machines(self) -> list[tuple[str, str]]:
        given = {"node": self.node, "address": self.address}
        if self.nodes == 1:
            text = "is about several machines, and launch.nodes is 1; leave it out, or set launch.nodes"
            return [(f"launch.{name}", text) for name, value in given.items() if value is not None]
        found = []
        text = (
            f"with launch.nodes={self.nodes} is for launch=ray, which has one launcher for all machines; leave it out"
        )
        given = {"samplers": self.samplers > 0, "attempts": self.attempts > 1}
        found += [(f"launch.{name}", text) for name, is_set in given.items() if is_set]
        if self.node is None or self.node >= self.nodes:
            text = f"the machines of launch.nodes={self.nodes} are 0 to {self.nodes - 1}; give each its number"
            found.append(("launch.node", text))
        named = ADDRESS.fullmatch(self.address or "")
        if named is None or not 0 < int(named["port"]) < 2**16:
            found.append(("launch.address", "machine 0's HOST:PORT is expected, the same on each, e.g. 10.0.0.1:29400"))
        return found


class LocalConfig(MachinesConfig):
    """This process; for several devices, a process for each that this one starts and watches."""

    factory: ClassVar[str] = "runner.launch.attempt:attempt"
    name: Literal["local"] = "local"


class StartedConfig(MachinesConfig):
    """What something else starts on each machine, and tells the machine's number and machine 0's address."""

    nodes: int = Field(default=1, ge=1, description="Machines; who starts the command on them says how many there are.")
    node: int | None = Field(default=None, ge=0, description="This machine's number; not to be set, it is told.")
    address: str | None = Field(default=None, description="HOST:PORT of machine 0; not to be set, it is told.")

    def _about_machines(self) -> list[tuple[str, str]]:
        told = self.node is not None or self.address is not None
        later = () if told else ("launch.node", "launch.address")
        return [(key, text) for key, text in super()._about_machines() if key not in later]


class TorchrunConfig(StartedConfig):
    """Ranks that torchrun has started: the command is typed behind it, and has its layout from it."""

    factory: ClassVar[str] = "runner.launch.attempt:attempt"
    name: Literal["torchrun"] = "torchrun"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.samplers:
            found.append(("launch.samplers", "torchrun starts ranks alone; leave it out, or take launch=local"))
        if self.attempts > 1:
            text = "what torchrun ends, nobody here begins again; leave it out, or take launch=local"
            found.append(("launch.attempts", text))
        return found


class SlurmConfig(StartedConfig):
    """The machines of a Slurm job: in one, the command joins it; on a login node, it is submitted."""

    factory: ClassVar[str] = "runner.launch.attempt:attempt"
    name: Literal["slurm"] = "slurm"
    nodes: int = Field(default=1, ge=1, description="Machines to ask for; a Slurm job says itself how many it has.")
    partition: str | None = Field(default=None, description="Slurm partition; null = that of the cluster.")
    account: str | None = Field(default=None, description="Slurm account.")
    qos: str | None = Field(default=None, description="Slurm quality of service.")
    gres: str | None = Field(
        default=None, description="What Slurm calls a machine's cards, e.g. gpu:a100 or npu:910b; null = gpu or npu."
    )
    cpus: int | None = Field(
        default=None, ge=1, description="Cores per machine; null = device.threads per device, with cards the cluster's."
    )
    time: str | int | None = Field(
        default=None, description="Time limit as sbatch has it: 2:00:00, 1-12, minutes; null = the partition's."
    )
    grace_s: int = Field(
        default=120, ge=1, description="Seconds before that limit at which the job saves, and goes back into the queue."
    )
    sbatch: dict[str, str | int | bool] = Field(
        default_factory=dict, description="More options of sbatch: {mem: 64G, constraint: a100, exclusive: true}."
    )
    wait: bool = Field(default=False, description="Follow a job that was submitted to its end, and end as it does.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        for name, value in self.sbatch.items():
            if who := SAID_BY_LAUNCH.get(name.replace("_", "-")):
                found.append(("launch.sbatch", f"{name} is set by {who}; leave it out"))
            if value is False:
                found.append(("launch.sbatch", f"{name}: false says nothing to sbatch; leave it out"))
        if self.gres is not None and job.device.name == "cpu":
            found.append(("launch.gres", "device=cpu has no cards; leave it out"))
        return found


class RayConfig(LaunchConfig):
    """Processes that Ray places, on the nodes of a cluster or on this machine: an actor stands by each."""

    factory: ClassVar[str] = "runner.launch.ray_attempt:attempt"
    name: Literal["ray"] = "ray"
    attempts: int = Field(
        default=3, ge=1, description="Times that the job may begin: after a lost process it goes on by itself."
    )
    address: str | None = Field(
        default=None, description="Of the Ray cluster, HOST:PORT or auto; null = one on this machine for this job."
    )

    @property
    def here(self) -> bool:
        return self.address is None

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.address is None:
            return found
        if self.address != "auto" and ADDRESS.fullmatch(self.address) is None:
            text = "auto or HOST:PORT is expected, as `ray start --head` says it"
            if self.address.startswith("ray://"):
                text = "Ray's client cannot follow a job; type this on a node of the cluster, with auto or HOST:PORT"
            found.append(("launch.address", text))
        if job.device.name == "auto":
            text = "what the nodes have is not known here, and Ray wants its name; type device=npu, cuda or cpu"
            found.append(("device", text))
        return found


COMPONENTS = (LocalConfig, TorchrunConfig, SlurmConfig, RayConfig)
