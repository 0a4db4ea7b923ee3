"""What a user can set of an environment."""

from __future__ import annotations

import os
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.spec.base import ComponentConfig, address_problem
from runner.user_code.config import UserCodeConfig


class EnvironmentConfig(ComponentConfig):
    """What answers the policy between its turns."""

    group: ClassVar[str] = "environment"
    has_score: ClassVar[bool] = False  # whether it may score episodes

    def most_turns(self) -> int:
        """Most turns of the policy in one episode."""
        return 1

    def episode_token_limit(self) -> int | None:
        """Maximum tokens of an episode after its prompt, with all messages; None = the model's limit."""
        return None

    def is_repeatable(self) -> bool:
        """Whether runs with the same seed give the same bytes: not where it matters which tool is the faster."""
        return True

    def preflight(self) -> None:
        """Raise for what is wrong outside the spec; imports nothing heavy."""


class NoEnvironmentConfig(EnvironmentConfig):
    """No environment: an episode is one completion."""

    factory: ClassVar[str] = "runner.environment.config:no_environment"
    name: Literal["none"] = "none"


class CalculatorConfig(EnvironmentConfig):
    """A calculator: replies to a turn `calc EXPRESSION` with its value; any other turn ends the episode."""

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


def is_url(command: str) -> bool:
    """Whether it is the URL of a server, and not a command."""
    return command.startswith(("http://", "https://"))


class CommandEnvironmentConfig(EnvironmentConfig):
    """An environment that is a command or a server; `command_option` is the field that has it."""

    command_option: ClassVar[str]
    env: tuple[str, ...] = Field(
        default=(), strict=False, description="Further environment variables that are passed to the command."
    )

    @property
    def _key_and_command(self) -> tuple[str, str]:
        return f"environment.{self.command_option}", getattr(self, self.command_option)

    def problems(self, job: Any) -> list[tuple[str, str]]:
        key, command = self._key_and_command
        try:
            wrong = address_problem(command, "/PATH") if is_url(command) else None
            wrong = wrong or (None if shlex.split(command) else "no program is named")
        except ValueError as error:
            wrong = f"invalid shell quoting: {error}"
        return super().problems(job) + ([] if wrong is None else [(key, wrong)])

    def with_absolute_paths(self) -> Self:
        """The same config with the paths of files in its command made absolute."""
        _, command = self._key_and_command
        if is_url(command):
            return self
        words = [os.path.abspath(word) if Path(word).is_file() else word for word in shlex.split(command)]
        return self.model_copy(update={self.command_option: shlex.join(words)})

    def preflight(self) -> None:
        """Raise SpecError where the program of the command is missing."""
        key, command = self._key_and_command
        if not is_url(command) and not shutil.which(program := shlex.split(command)[0]):
            raise SpecError([Problem(key, f"program '{program}' not found on PATH; set an executable command")])


class ToolEnvironmentConfig(EnvironmentConfig):
    """Tools that are called in separate processes, one for each episode."""

    max_turns: int = Field(default=8, ge=2, description="Maximum turns of the policy in one episode.")
    max_episode_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of all turns and results after the prompt; null = the model's."
    )
    max_tool_output: int = Field(
        default=10_000, ge=2, description="Maximum characters of one result; of a longer one the middle is left out."
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="Timeout in seconds for the calls of one turn; then the episode is left out."
    )
    max_wait_s: float | None = Field(
        default=None, gt=0, description="Seconds to wait for the last episodes alone, before they are left out."
    )
    lockstep: bool = Field(
        default=False, description="Wait for all replies before the next turns: slower, bit-identical runs."
    )
    workers: int = Field(
        default=64,
        ge=1,
        description="Number of episodes of a rank that run calls at the same time; at most four times as many are "
        "played, each in a process.",
    )
    max_failures: int = Field(
        default=64, ge=1, description="Stop the run after this many consecutive failed episodes on one rank."
    )

    def most_turns(self) -> int:
        return self.max_turns

    def episode_token_limit(self) -> int | None:
        return self.max_episode_tokens

    def is_repeatable(self) -> bool:
        return self.lockstep


class FunctionEnvironmentConfig(UserCodeConfig, ToolEnvironmentConfig):
    """Your own Python class, whose public methods are the tools, or function; in separate processes."""

    factory: ClassVar[str] = "runner.environment.function:build"
    path_example: ClassVar[str] = "shop.py:Shop"
    takes_classes: ClassVar[bool] = True
    has_score: ClassVar[bool] = True
    name: Literal["function"] = "function"
    path: str = Field(min_length=1, description="File and class or function, e.g. shop.py:Shop.")


class McpEnvironmentConfig(CommandEnvironmentConfig, ToolEnvironmentConfig):
    """The tools of an MCP server, which is started for each episode, or has a URL."""

    factory: ClassVar[str] = "runner.environment.mcp:build"
    command_option: ClassVar[str] = "server"
    name: Literal["mcp"] = "mcp"
    server: str = Field(
        min_length=1, description="Command that uses MCP over stdio, e.g. 'python tools_server.py', or URL of a server."
    )

    def preflight(self) -> None:
        """Raise SpecError without the program of the command, EnvironmentProblem without the package mcp."""
        super().preflight()
        if find_spec("mcp") is None:
            raise EnvironmentProblem("environment=mcp needs the package mcp\n  pip install 'posttrain-run[mcp]'")


class AgentEnvironmentConfig(CommandEnvironmentConfig):
    """Programs that call the policy as a model behind OpenAI's API; their calls are trained on."""

    factory: ClassVar[str] = "runner.inference.agent:build"
    command_option: ClassVar[str] = "command"
    has_score: ClassVar[bool] = True
    name: Literal["agent"] = "agent"
    command: str = Field(
        min_length=1,
        description="Command of a program that runs one episode, e.g. 'python my_agent.py', or URL of a server.",
    )
    max_turns: int = Field(default=64, ge=2, description="Maximum completions that a program may request per episode.")
    timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Timeout in seconds of an episode; time spent waiting for the policy does not count.",
    )
    workers: int = Field(default=32, ge=1, description="Number of programs of a rank that run at the same time.")
    max_failures: int = Field(
        default=64, ge=1, description="Stop the run after this many consecutive failed episodes on one rank."
    )

    def most_turns(self) -> int:
        return self.max_turns

    def is_repeatable(self) -> bool:
        return False


COMPONENTS = (
    NoEnvironmentConfig,
    CalculatorConfig,
    FunctionEnvironmentConfig,
    McpEnvironmentConfig,
    AgentEnvironmentConfig,
)
