"""What draws rollouts from the policy."""

from typing import ClassVar, Literal

from runner.spec.base import ComponentConfig


class SamplerConfig(ComponentConfig):
    """Where rollouts come from."""

    group: ClassVar[str] = "sampler"


class NoSamplerConfig(SamplerConfig):
    """No rollouts: for algorithms that learn from given data."""

    factory: ClassVar[str] = "runner.sampler.none:build"
    name: Literal["none"] = "none"


COMPONENTS = (NoSamplerConfig,)
