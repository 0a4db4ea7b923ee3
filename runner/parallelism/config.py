"""How one job is spread over devices: one schema, whose names are presets."""

from typing import Any, ClassVar, Literal

from runner.spec.base import ComponentConfig


class ParallelismConfig(ComponentConfig):
    """The device mesh of the trainer."""

    group: ClassVar[str] = "parallelism"


class SingleConfig(ParallelismConfig):
    """One process on one device."""

    factory: ClassVar[str] = "runner.parallelism.single:SingleRank"
    name: Literal["single"] = "single"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if job.launch.devices == 1:
            return []
        return [
            ("launch.devices", f"parallelism=single runs one process, not {job.launch.devices}; set launch.devices=1")
        ]


COMPONENTS = (SingleConfig,)
