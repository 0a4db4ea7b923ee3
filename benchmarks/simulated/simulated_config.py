"""Components of a package beside the project: a sampler and an optimizer that take as long as they are told."""

from typing import ClassVar, Literal

from pydantic import Field

from runner.optimizer.config import SgdConfig
from runner.sampler.config import TorchSamplerConfig


class SimulatedSampler(TorchSamplerConfig):
    """torch's sampler on a device of the given speed."""

    factory: ClassVar[str] = "simulated:sampler"
    name: Literal["simulated"] = "simulated"  # type: ignore[assignment]
    seconds: float = Field(default=1.0, gt=0, description="Seconds that the answers of a step take.")


class SimulatedOptimizer(SgdConfig):
    """SGD behind a training of the given length."""

    factory: ClassVar[str] = "simulated:optimizer"
    name: Literal["simulated"] = "simulated"  # type: ignore[assignment]
    seconds: float = Field(default=1.0, gt=0, description="Seconds that a step's training takes.")
