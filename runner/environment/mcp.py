"""environment=mcp: the tools of an MCP server, played as those of a user's class (`function.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.environment import mcp_tools
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
    variables = {mcp_tools.SERVER: config.server}
    target = FunctionTarget(
        Path(mcp_tools.__file__), "McpTools", imports_siblings=False, env=config.env, variables=variables
    )
    return play_target(config, target, config.server, "environment.server", decide, chat, folder)
