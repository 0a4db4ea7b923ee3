"""Who starts the processes of a job."""

from typing import ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig


class LaunchConfig(ComponentConfig):
    """How the processes of a job come to be."""

    group: ClassVar[str] = "launch"
    devices: int = Field(default=1, ge=1, description="Processes on this machine, one per device; on the CPU, ranks.")


class LocalConfig(LaunchConfig):
    """This process."""

    factory: ClassVar[str] = "runner.launch.local:launch"
    name: Literal["local"] = "local"


COMPONENTS = (LocalConfig,)
