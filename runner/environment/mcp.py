"""environment=mcp: the tools of an MCP server, called like those of a user's class (`function.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.environment.config import McpEnvironmentConfig
from runner.environment.function import FunctionEnvironments, play_target
from runner.interfaces.environments import EpisodeChat
from runner.user_code.process import FunctionTarget

if TYPE_CHECKING:
    from runner.interfaces import Decide


def build(
    config: McpEnvironmentConfig,
    *,
    decide: Decide,
    chat: Callable[[], EpisodeChat],
    folder: Path | None = None,
    **_: Any,
) -> FunctionEnvironments:
    """Start the process that connects to the server. Raises SpecError if it cannot."""
    config.preflight()
    variables = {"RUN_MCP_SERVER": config.server}
    program = Path(__file__).with_name("mcp_tools.py")  # not imported here: it needs the package mcp
    target = FunctionTarget(program, "McpTools", imports_siblings=False, env=config.env, variables=variables)
    return play_target(config, target, config.server, "environment.server", decide, chat, folder)
