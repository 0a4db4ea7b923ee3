"""What every reward's config has."""

from typing import ClassVar, Self

from pydantic import Field

from runner.spec.base import ComponentConfig, Dtype

OWN = ("prompts", "completions", "completion_ids")  # what a function or service gets beside the columns


class RewardConfig(ComponentConfig):
    """How sampled answers are scored."""

    group: ClassVar[str] = "reward"
    runs_model: ClassVar[bool] = False  # whether a model on the device scores
    summable: ClassVar[bool] = True  # whether it can be a part of a sum

    def absolute(self) -> Self:
        """The same config with the paths of local files made absolute."""
        return self

    def with_dtype(self, dtype: Dtype) -> Self:
        """The same config; where it leaves the data type of a model open, with `dtype`."""
        return self

    def model_dtype(self) -> Dtype | None:
        """The data type of a model that scores; None = there is none, or it is left open."""
        return None

    def columns(self) -> list[tuple[str, str]]:
        """(option, column) of each column of the data that it cannot score without; nothing of the user's is run."""
        return []

    def preflight(self) -> None:
        """Raise for what is wrong outside the spec (files, packages); imports nothing heavy."""


class PooledConfig(RewardConfig):
    """A reward that scores in worker processes of each rank."""

    workers: int = Field(default=1, ge=1, description="Processes that score groups at the same time.")
    timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds for one group; then the process is killed, the group unscored."
    )
