"""Who starts the processes of a job."""

import re
from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig

ADDRESS = re.compile(r"(?P<host>[^\s:]+|\[[^\]\s]+\]):(?P<port>\d{1,5})")


class LaunchConfig(ComponentConfig):
    """How the processes of a job come to be."""

    group: ClassVar[str] = "launch"
    devices: int = Field(default=1, ge=1, description="Processes on this machine, one per device; on the CPU, ranks.")
    nodes: int = Field(default=1, ge=1, description="Machines; the same command is typed on each, with its node.")
    node: int | None = Field(
        default=None, ge=0, description="This machine's number, from 0; given where nodes is above 1."
    )
    address: str | None = Field(
        default=None, description="HOST:PORT at which machine 0 is found by the others; given where nodes is above 1."
    )

    @property
    def world(self) -> int:
        """Processes on all machines."""
        return self.devices * self.nodes

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of machine 0, of several."""
        found = ADDRESS.fullmatch(self.address or "")
        assert found is not None  # `problems` saw to it
        return found["host"].strip("[]"), int(found["port"])

    def problems(self, job: Any) -> list[tuple[str, str]]:
        given = {"node": self.node, "address": self.address}
        if self.nodes == 1:
            text = "is about several machines, and launch.nodes is 1; leave it out, or set launch.nodes"
            return [(f"launch.{name}", text) for name, value in given.items() if value is not None]
        found = []
        if self.node is None or self.node >= self.nodes:
            text = f"the machines of launch.nodes={self.nodes} are 0 to {self.nodes - 1}; give each its number"
            found.append(("launch.node", text))
        named = ADDRESS.fullmatch(self.address or "")
        if named is None or not 0 < int(named["port"]) < 2**16:
            found.append(("launch.address", "machine 0's HOST:PORT is expected, the same on each, e.g. 10.0.0.1:29400"))
        return found


class LocalConfig(LaunchConfig):
    """This process; for several devices, a process for each that this one starts and watches."""

    factory: ClassVar[str] = "runner.launch.attempt:attempt"
    name: Literal["local"] = "local"


COMPONENTS = (LocalConfig,)
