"""Options of trackers, in addition to metrics.jsonl and the screen."""

from typing import ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig, Names


class TrackerConfig(ComponentConfig):
    """A tracker of metrics and samples; its failure never stops a run."""

    group: ClassVar[str] = "tracker"

    def of_sweep(self, sweep: str, job: str) -> dict[str, str]:
        """Default options of a sweep's job, by which the tracker groups jobs.

        sweep: the name of the sweep's folder; job: what this job varies, e.g. "lr=1e-4 seed=2"
        """
        return {}


class NoTrackerConfig(TrackerConfig):
    """metrics.jsonl and the screen only."""

    factory: ClassVar[str] = "runner.tracker.jsonl:no_tracker"
    name: Literal["none"] = "none"


class UploadConfig(TrackerConfig):
    """Options of the trackers that run in an upload process."""

    factory: ClassVar[str] = "runner.tracker.uploader:build"
    name: str
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="online = upload during the run; offline = files for the tracker's `sync` command.",
    )
    project: str = Field(default="runner", min_length=1, description="Project that this run belongs to.")
    display_name: str | None = Field(
        default=None, description="The tracker's name for this run; null = that of its folder."
    )
    run_group: str | None = Field(default=None, description="The tracker's group that this run belongs to.")
    tags: Names = Field(default=(), description="Tags of this run.")
    deadline_s: float = Field(
        default=30.0, gt=0, description="Maximum seconds that the end of a run waits for the upload."
    )

    def of_sweep(self, sweep: str, job: str) -> dict[str, str]:
        return {"run_group": sweep, "display_name": job}


class WandbConfig(UploadConfig):
    """Weights & Biases, in a separate process."""

    name: Literal["wandb"] = "wandb"
    entity: str | None = Field(default=None, description="W&B user or team; null = the default of the key.")


class SwanlabConfig(UploadConfig):
    """SwanLab, in a separate process."""

    name: Literal["swanlab"] = "swanlab"
    workspace: str | None = Field(default=None, description="SwanLab user or team; null = the default of the key.")


class TensorboardConfig(TrackerConfig):
    """TensorBoard event files in the run folder."""

    factory: ClassVar[str] = "runner.tracker.tensorboard:build"
    name: Literal["tensorboard"] = "tensorboard"


COMPONENTS = (NoTrackerConfig, WandbConfig, SwanlabConfig, TensorboardConfig)
