"""environment=mcp: the tools of an MCP server, called like those of a user's class (`function.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.environment.config import McpEnvironmentConfig
from runner.environment.function import FunctionEnvironments, play_target
from runner.user_code.process import FunctionTarget


def build(config: McpEnvironmentConfig, **context: Any) -> FunctionEnvironments:
    """Start the process that connects to the server. Raises SpecError if it cannot.

    context: see `play_target`
    """
    config.preflight()
    variables = {"RUN_MCP_SERVER": config.server}
    program = Path(__file__).with_name("mcp_tools.py")  # not imported here: it needs the package mcp
    target = FunctionTarget(program, "McpTools", imports_siblings=False, env=config.env, variables=variables)
    return play_target(config, target, config.server, "environment.server", **context)
