"""What every reward's config has."""

from typing import ClassVar, Self

from runner.spec.base import ComponentConfig


class RewardConfig(ComponentConfig):
    """How sampled answers are scored."""

    group: ClassVar[str] = "reward"
    summable: ClassVar[bool] = True  # whether it can be a part of a sum

    def absolute(self) -> Self:
        """The same config with the paths of local files made absolute."""
        return self

    def preflight(self) -> None:
        """Raise for what is wrong outside the spec (files, packages); imports nothing heavy."""
