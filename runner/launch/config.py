"""Who starts the processes of a job."""

from typing import Any, ClassVar, Literal

from runner.launch.base import LaunchConfig as LaunchConfig
from runner.launch.base import MachinesConfig, StartedConfig
from runner.launch.ray.config import RayConfig
from runner.launch.slurm.config import SlurmConfig


class LocalConfig(MachinesConfig):
    """This process; for several devices, a process for each that this one starts and watches."""

    factory: ClassVar[str] = "runner.launch.local:attempt"
    name: Literal["local"] = "local"


class TorchrunConfig(StartedConfig):
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
