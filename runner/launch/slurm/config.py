"""Who starts the processes of a job: Slurm."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.launch.base import StartedConfig

SAID_BY_LAUNCH = {
    **dict.fromkeys(
        ("array", "job-name", "output", "error", "open-mode", "signal", "requeue", "chdir"), "launch=slurm"
    ),
    **{name: f"launch.{name}" for name in ("partition", "account", "qos", "gres", "time", "nodes")},
    **{"cpus-per-task": "launch.cpus", "ntasks": "launch.nodes", "ntasks-per-node": "launch.nodes"},
}  # what launch.sbatch may not say, and where it is said


class SlurmConfig(StartedConfig):
    """The machines of a Slurm job: in one, the command joins it; on a login node, it is submitted."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    queued: ClassVar[bool] = True
    name: Literal["slurm"] = "slurm"
    nodes: int = Field(default=1, ge=1, description="Machines to ask for; a Slurm job says itself how many it has.")
    partition: str | None = Field(default=None, description="Slurm partition; null = that of the cluster.")
    account: str | None = Field(default=None, description="Slurm account.")
    qos: str | None = Field(default=None, description="Slurm quality of service.")
    gres: str | None = Field(
        default=None, description="What Slurm calls a machine's cards, e.g. gpu:a100 or npu:910b; null = gpu or npu."
    )
    cpus: int | None = Field(
        default=None,
        ge=1,
        description="Cores per machine; null = device.threads per device; on cards, the cluster's.",
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
        if self.gres is not None and job.device.is_cpu:
            found.append(("launch.gres", "device=cpu has no cards; leave it out"))
        return found
