"""Options of the callback that ends a run early."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.checkpoint.config import direction
from runner.spec.base import CallbackConfig


class StopWhenConfig(CallbackConfig):
    """Ends a run early, with state done, when a metric stops improving or reaches a bound."""

    factory: ClassVar[str] = "runner.trainer.callbacks:StopWhen"
    name: Literal["stop_when"] = "stop_when"
    metric: str = Field(description="Metric that decides, e.g. eval/reward/mean.")
    mode: Literal["max", "min"] | None = Field(
        default=None, description="Whether more or less of the metric is better; null = derived from its name."
    )
    patience: int | None = Field(
        default=None, ge=1, description="Measurements in a row without improvement that end the run; null = any number."
    )
    min_delta: float = Field(default=0.0, ge=0, description="An improvement is a difference above this.")
    stopping_threshold: float | None = Field(
        default=None, description="Value that ends the run when it is reached; null = none."
    )

    @property
    def sign(self) -> float:
        """1 where more of the metric is better, else -1."""
        return -1.0 if (self.mode or direction(self.metric)) == "min" else 1.0

    def problems(self, job: Any) -> list[tuple[str, str]]:
        key, found = "callbacks.stop_when", list[tuple[str, str]]()
        if self.patience is None and self.stopping_threshold is None:
            found.append((key, f"never ends the run; give {key}.patience=3, or {key}.stopping_threshold=VALUE"))
        if self.patience is None and self.min_delta:
            found.append((f"{key}.min_delta", f"is for {key}.patience; leave it out"))
        if self.mode is None and direction(self.metric) is None:
            found.append((f"{key}.mode", f"must be given, max or min, because {self.metric} has no known direction"))
        return found

    def required_metrics(self) -> list[tuple[str, str]]:
        return [("metric", self.metric)]


COMPONENTS = (StopWhenConfig,)
