"""What a user can set of an environment."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig


class EnvironmentConfig(ComponentConfig):
    """What answers the policy between its turns."""

    group: ClassVar[str] = "environment"

    def most_turns(self) -> int:
        """Most turns of the policy in one episode."""
        return 1


class NoEnvironmentConfig(EnvironmentConfig):
    """No environment: an episode is one completion."""

    factory: ClassVar[str] = "runner.environment.config:no_environment"
    name: Literal["none"] = "none"


class CalculatorConfig(EnvironmentConfig):
    """A calculator: replies to a turn `calc EXPRESSION` with its value; any other turn is the answer."""

    factory: ClassVar[str] = "runner.environment.calculator:build"
    name: Literal["calculator"] = "calculator"
    max_turns: int = Field(
        default=4, ge=2, description="Maximum turns of the policy; for one turn use environment=none."
    )

    role: Literal["tool", "user"] = Field(
        default="tool", description="Role of its messages; user if the chat template has no role tool."
    )

    def most_turns(self) -> int:
        return self.max_turns


def no_environment(config: NoEnvironmentConfig, **_: Any) -> None:
    """Nothing to build."""


COMPONENTS = (NoEnvironmentConfig, CalculatorConfig)
