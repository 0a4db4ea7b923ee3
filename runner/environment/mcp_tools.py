"""The class that environment=mcp runs episodes of: its tools are those of an MCP server.

Protocol and SDK: https://modelcontextprotocol.io

Runs in the processes of episodes (`worker.py`). A server that is a command is started for each episode; all episodes
share one that has a URL.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from tempfile import TemporaryFile
from typing import Any, TextIO

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import CONNECTION_CLOSED

from runner.user_code.worker import EpisodeError, first_cause

SERVER = "RUN_MCP_SERVER"  # the variable that has the command or the URL; `mcp.py` sets it


def make_client(stderr: TextIO = sys.stderr) -> Client:
    """A client of the server, to be entered. stderr: of a command"""
    server = os.environ[SERVER]
    if server.startswith(("http://", "https://")):
        return Client(server)
    program, *arguments = shlex.split(server)
    parameters = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
    return Client(stdio_client(parameters, stderr))


async def list_tools(client: Client) -> list[Any]:
    """The schemas of all tools of a server, as chat templates take them."""
    found, cursor, more = list[Any](), None, True
    while more:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor, more = page.next_cursor, page.next_cursor is not None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in found
    ]


class McpTools:
    """One episode: a connection to the server."""

    @staticmethod
    def _tool_schemas() -> list[Any]:
        async def connect(stderr: TextIO) -> list[Any]:
            async with make_client(stderr) as client:
                return await list_tools(client)

        printed = ""
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
            try:
                return asyncio.run(connect(stderr))
            except Exception as error:
                stderr.seek(0)
                printed = stderr.read().strip()
                last = printed.rpartition("\n")[2]
                raise RuntimeError(f"{first_cause(error)}; the server printed: {last[:400] or 'nothing'}") from error
            finally:
                print(printed, file=sys.stderr)

    async def reset(self, prompt: object, **columns: object) -> None:
        """Connect. The connection lives in a task of its own, as the SDK requires, until the process ends."""
        self._call_lock = asyncio.Lock()
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()

        async def stay_connected() -> None:
            try:
                async with make_client() as client:
                    ready.set_result(client)
                    await asyncio.Event().wait()
            except Exception as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        self._task = asyncio.create_task(stay_connected())
        self._client = await ready

    async def _call_tool(self, tool: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's result.

        Calls of a turn run one after another, since servers run them in threads and could take another order.
        Raises RuntimeError with the text of a tool that failed, EpisodeError where the server has gone.
        """
        try:
            async with self._call_lock:
                result = await self._client.call_tool(tool, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise EpisodeError(f"the MCP server has gone: {error}") from error
            raise
        texts = [getattr(one, "text", f"[{one.type} is not supported]") for one in result.content]
        text = "\n".join(texts) if texts else json.dumps(result.structured_content)
        if result.is_error:
            raise RuntimeError(text)
        return text
