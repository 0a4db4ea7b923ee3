"""When state is saved and how much of it is kept."""

from typing import ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig


class CheckpointConfig(ComponentConfig):
    """Resumable state on disk, and what the run leaves for others."""

    group: ClassVar[str] = "checkpoint"
    every: int = Field(
        default=50, ge=0, description="Steps between checkpoints; one is also written at the end. 0 = only then."
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
    best: str | None = Field(
        default=None, description="Metric whose best checkpoint is kept beside the newest, e.g. eval/exact_match."
    )
    best_mode: Literal["max", "min"] = Field(default="max", description="Whether more or less of the metric is better.")
    export: bool = Field(
        default=True, description="Write export/ (Hugging Face folder or PEFT adapter) when the run is done."
    )


class SafetensorsConfig(CheckpointConfig):
    """Safetensors and JSON under a manifest of checksums, renamed into place."""

    factory: ClassVar[str] = "runner.checkpoint.store:CheckpointStore"
    name: Literal["safetensors"] = "safetensors"


COMPONENTS = (SafetensorsConfig,)
