"""One HTTP request with one deadline over name lookup, connection, headers and body.

run(request("POST", url, timeout_s=…, largest_bytes=…, body=…)) ─▶ (status, body)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from aiohttp import (
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientPayloadError,
    ClientSession,
    ClientSSLError,
    ClientTimeout,
)
from yarl import URL

T = TypeVar("T")


class AnswerTooLargeError(ClientPayloadError):
    """The body is larger than the caller takes."""


class _Loop(asyncio.SelectorEventLoop):
    """Event loop that does not wait at its end for a name lookup, which no timeout can interrupt."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing: close() ends the executor without joining its threads."""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own, in any thread."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


async def request(
    method: str,
    url: str,
    *,
    timeout_s: float,
    largest_bytes: int,
    body: bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    proxies: bool = False,
) -> tuple[int, bytes]:
    """Status and body of the response; redirects are not followed.

    body: JSON; headers: beside its type; proxies: whether those of the environment (HTTPS_PROXY, …) are used. Raises
    TimeoutError after timeout_s, wherever the request is by then, AnswerTooLargeError, and OSError or ClientError where
    there is no whole answer.
    """
    sent = {"Content-Type": "application/json", **headers}
    async with (
        ClientSession(timeout=ClientTimeout(total=timeout_s), headers=sent, trust_env=proxies) as session,
        session.request(method, URL(url, encoded=True), data=body, allow_redirects=False) as response,
    ):
        content = bytearray()
        async for part in response.content.iter_any():
            content += part
            if len(content) > largest_bytes:
                raise AnswerTooLargeError(f"the answer is above {largest_bytes >> 20} MiB")
        return response.status, bytes(content)


def cause(error: BaseException) -> str:
    """Why there is no answer, in words."""
    if isinstance(error, ClientConnectorError) and not isinstance(error, ClientConnectorDNSError | ClientSSLError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else str(error)
    return str(error) or type(error).__name__
