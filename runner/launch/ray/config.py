"""Who starts the processes of a job: Ray."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.launch.base import ADDRESS, LaunchConfig, is_web_address, submit_command


class RayConfig(LaunchConfig):
    """Processes that Ray places, on the nodes of a cluster or on this machine: an actor stands by each."""

    factory: ClassVar[str] = "runner.launch.ray.attempt:attempt"
    name: Literal["ray"] = "ray"
    attempts: int = Field(
        default=3, ge=1, description="Times that the job may begin: after a lost process it goes on by itself."
    )
    address: str | None = Field(
        default=None, description="Of the Ray cluster: auto or HOST:PORT; null = one on this machine for this job."
    )

    @property
    def here(self) -> bool:
        return self.address is None

    def preflight(self) -> None:
        """Raise EnvironmentProblem where Ray is not installed, or its cluster not there."""
        from runner.launch.ray.knock import knock  # here, because every command reads this module
        from runner.launch.ray.link import need_ray

        need_ray("launch=ray")
        if self.address is not None:
            knock(self.address)

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
