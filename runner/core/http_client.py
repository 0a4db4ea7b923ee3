"""One HTTP request with one deadline over name lookup, connection, headers and body.

run(request("POST", url, timeout_s=…, largest_bytes=…, body=…)) ─▶ (status, body)
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from aiohttp import (
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientPayloadError,
    ClientSession,
    ClientSSLError,
    ClientTimeout,
)
from yarl import URL

P = ParamSpec("P")
T = TypeVar("T")


class AnswerTooLargeError(ClientPayloadError):
    """The body is larger than the caller takes."""


class _DaemonThreads(ThreadPoolExecutor):
    """A daemon thread for each call; ThreadPoolExecutor's own threads are joined when the program ends."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # whatever it is, the caller gets it
                future.set_exception(error)

        if future.set_running_or_notify_cancel():
            threading.Thread(target=work, name="name lookup", daemon=True).start()
        return future


class _Loop(asyncio.SelectorEventLoop):
    """Event loop that ends without waiting for a name lookup, which no timeout can interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.set_default_executor(_DaemonThreads())


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
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


def failure_reason(error: BaseException) -> str:
    """Why there is no answer, in words."""
    if isinstance(error, ClientConnectorError) and not isinstance(error, ClientConnectorDNSError | ClientSSLError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else str(error)
    return str(error) or type(error).__name__
