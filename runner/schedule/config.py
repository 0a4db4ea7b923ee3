"""How the learning rate changes over the run: a pure function of the step."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig


class ScheduleConfig(ComponentConfig):
    """A factor on the learning rate, from the fraction of the run that is done."""

    group: ClassVar[str] = "schedule"
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear rise from 0 to the peak.")


class ConstantConfig(ScheduleConfig):
    """The peak, to the end."""

    factory: ClassVar[str] = "runner.schedule.shapes:constant"
    name: Literal["constant"] = "constant"


class DecayConfig(ScheduleConfig):
    """What falling schedules have in common: the end would be reached one step after the last, which still learns."""

    final_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Share of the peak that the learning rate falls towards."
    )


class LinearConfig(DecayConfig):
    """A straight line from the peak to the end."""

    factory: ClassVar[str] = "runner.schedule.shapes:linear"
    name: Literal["linear"] = "linear"


class CosineConfig(DecayConfig):
    """Half a cosine from the peak to the end (Loshchilov & Hutter, 1608.03983)."""

    factory: ClassVar[str] = "runner.schedule.shapes:cosine"
    name: Literal["cosine"] = "cosine"


class WsdConfig(DecayConfig):
    """Warm-up, stable, decay (Hu et al., 2404.06395): the peak, then a straight line at the end."""

    factory: ClassVar[str] = "runner.schedule.shapes:wsd"
    name: Literal["wsd"] = "wsd"
    decay_steps: int = Field(default=0, ge=0, description="Steps of the final fall; 0 = a tenth of the run.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if not self.decay_steps or self.warmup_steps + self.decay_steps <= job.steps:
            return []
        warmup = f"schedule.warmup_steps={self.warmup_steps}"
        return [("schedule.decay_steps", f"{self.decay_steps} and {warmup} are more than steps={job.steps}")]


COMPONENTS = (ConstantConfig, LinearConfig, CosineConfig, WsdConfig)
