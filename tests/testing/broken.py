"""Components that break their contract, each in the way that its option says."""

from typing import ClassVar, Literal

from pydantic import Field

from runner.data.config import DemoConfig
from runner.sampler.config import TorchSamplerConfig
from runner.spec import AdapterConfig, EnvironmentConfig, OptimizerConfig, RewardConfig, ScheduleConfig, TrackerConfig
from runner.spec.base import CallbackConfig

HERE = "tests.testing.broken_parts"
Way = Field(default="", description="In which way it is broken.")


class Undescribed(RewardConfig):
    """A reward."""

    factory: ClassVar[str] = f"{HERE}:reward"
    name: Literal["undescribed"] = "undescribed"
    summable: ClassVar[bool] = False
    sharpness: float = 1.0


class Unnamed(RewardConfig):
    """A reward."""

    factory: ClassVar[str] = f"{HERE}:reward"
    name: str = Field(default="unnamed", description="Its name.")
    summable: ClassVar[bool] = False


class Elsewhere(RewardConfig):
    """A reward."""

    factory: ClassVar[str] = f"{HERE}:no_such_factory"
    name: Literal["elsewhere"] = "elsewhere"
    summable: ClassVar[bool] = False


class BrokenReward(RewardConfig):
    """A reward."""

    factory: ClassVar[str] = f"{HERE}:reward"
    name: Literal["broken"] = "broken"
    summable: ClassVar[bool] = False
    way: str = Way

    def required_columns(self) -> list[tuple[str, str]]:
        return [("column", "answer")]


class BrokenEnvironment(EnvironmentConfig):
    """An environment."""

    factory: ClassVar[str] = f"{HERE}:environment"
    name: Literal["broken"] = "broken"
    way: str = Way

    def most_turns(self) -> int:
        return 2 if self.way == "turns" else 4


class BrokenOptimizer(OptimizerConfig):
    """An optimizer."""

    factory: ClassVar[str] = f"{HERE}:optimizer"
    name: Literal["broken"] = "broken"
    way: str = Way


class BrokenSchedule(ScheduleConfig):
    """A schedule."""

    factory: ClassVar[str] = f"{HERE}:schedule"
    name: Literal["broken"] = "broken"
    way: str = Way


class BrokenAdapter(AdapterConfig):
    """An adapter."""

    factory: ClassVar[str] = f"{HERE}:adapter"
    name: Literal["broken"] = "broken"
    way: str = Way


class BrokenSampler(TorchSamplerConfig):
    """A sampler."""

    factory: ClassVar[str] = f"{HERE}:sampler"
    name: Literal["broken"] = "broken"  # type: ignore[assignment]
    way: str = Way


class BrokenData(DemoConfig):
    """Data."""

    factory: ClassVar[str] = f"{HERE}:data"
    name: Literal["broken"] = "broken"  # type: ignore[assignment]
    way: str = Way


class BrokenCallback(CallbackConfig):
    """A callback."""

    factory: ClassVar[str] = f"{HERE}:callback"
    name: Literal["broken"] = "broken"
    way: str = Way


class BrokenTracker(TrackerConfig):
    """A tracker."""

    factory: ClassVar[str] = f"{HERE}:tracker"
    name: Literal["broken"] = "broken"
    way: str = Way
