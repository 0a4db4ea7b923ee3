"""When checkpoints are written and how many are kept."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig


class CheckpointConfig(ComponentConfig):
    """Checkpoints, from which a run resumes, and the export at its end."""

    group: ClassVar[str] = "checkpoint"
    every: int = Field(
        default=50, ge=0, description="Steps between checkpoints; one is also written at the end. 0 = only then."
    )
    asynchronous: bool | None = Field(
        default=None,
        description="Write in the background while training continues, from a copy in host memory; null = if it fits "
        "in half of the free memory.",
    )
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    best: str | None = Field(
        default=None, description="Metric whose best checkpoint is also kept, e.g. eval/exact_match."
    )
    best_mode: Literal["max", "min"] | None = Field(
        default=None, description="Whether a higher or lower value is better; null = derived from the name."
    )
    export: bool = Field(
        default=True, description="Write export/ (Hugging Face folder or PEFT adapter) at the end of the run."
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if self.asynchronous and not self.every:
            text = "is for checkpoints during the run, but checkpoint.every=0 writes only the last one; leave it out"
            return [("checkpoint.asynchronous", text), *self._problems_of_best()]
        return self._problems_of_best()

    def _problems_of_best(self) -> list[tuple[str, str]]:
        if self.best is None:
            return [("checkpoint.best_mode", "needs checkpoint.best; leave it out")] if self.best_mode else []
        if not self.best.startswith("eval/"):
            from runner.spec.migrate import renamed_metric

            if (ours := renamed_metric(self.best)) is not None:
                return [("checkpoint.best", f"no metric is named {self.best}; type checkpoint.best={ours}")]
        if self.best_mode is None and direction(self.best) is None:
            text = f"must be set to max or min, because checkpoint.best={self.best} has no known direction"
            return [("checkpoint.best_mode", text)]
        return []


LESS_IS_BETTER = ("loss", "perplexity", "reverse_kl", "divergence")
MORE_IS_BETTER = ("exact_match", "accuracy", "reward", "reward/mean", "margin", "pass", "mean")  # pass@k, mean@n


def direction(metric: str) -> Literal["max", "min"] | None:
    """Whether more (max) or less (min) of a metric is better, from its name; None = unknown."""
    parts = metric.split("/")
    names = {metric, parts[-1], "/".join(parts[-2:]), *(parts[-1].split("@")[:1] if "@" in parts[-1] else ())}
    return "min" if names.intersection(LESS_IS_BETTER) else "max" if names.intersection(MORE_IS_BETTER) else None


class SafetensorsConfig(CheckpointConfig):
    """Safetensors and JSON under a manifest of checksums, renamed into place."""

    factory: ClassVar[str] = "runner.checkpoint.store:CheckpointStore"
    name: Literal["safetensors"] = "safetensors"


COMPONENTS = (SafetensorsConfig,)
