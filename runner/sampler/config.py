"""What draws rollouts from the policy."""

from typing import Any, ClassVar, Literal

from runner.sampler.base import JobSamplerConfig
from runner.sampler.base import SamplerConfig as SamplerConfig
from runner.sampler.server.config import VllmServerConfig
from runner.sampler.vllm.config import VllmSamplerConfig


class NoSamplerConfig(SamplerConfig):
    """No rollouts: for algorithms that learn from given data."""

    factory: ClassVar[str] = "runner.sampler.none:build"
    name: Literal["none"] = "none"


class TorchSamplerConfig(JobSamplerConfig):
    """The model itself draws, in plain PyTorch: rollouts are equal bit for bit in every run on the same machine."""

    factory: ClassVar[str] = "runner.sampler.torch:build"
    shares_model: ClassVar[bool] = True
    name: Literal["torch"] = "torch"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if job.launch.samplers:
            return found
        text = "is about samplers of their own, and here the ranks sample; leave it out, or set launch.samplers"
        given = {"timeout_s": self.timeout_s, "probe": self.probe}
        return found + [(f"sampler.{name}", text) for name, value in given.items() if value is not None]


COMPONENTS = (NoSamplerConfig, TorchSamplerConfig, VllmSamplerConfig, VllmServerConfig)
