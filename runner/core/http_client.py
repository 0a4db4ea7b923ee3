"""One HTTP request with one deadline over name lookup, connection, headers and body.

run_coroutine(request("POST", url, timeout_s=…, largest_bytes=…, body=…)) ─▶ (status, body)
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from io import FileIO
from pathlib import Path
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
from aiohttp import ClientError as ClientError
from yarl import URL

from runner.core.threads import run_in_daemon_thread

P = ParamSpec("P")
T = TypeVar("T")
CONNECT_S = 5.0  # for a connection, where silence has a deadline
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
UPLOAD_BYTES = 1 << 20  # block size of an upload; the deadline is checked for each block


class AnswerTooLargeError(ClientPayloadError):
    """The body is larger than the caller's limit."""


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a daemon thread, unlike ThreadPoolExecutor's threads, which delay the exit."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return run_in_daemon_thread(partial(call, *args, **kwargs), "name lookup")


class _Loop(asyncio.SelectorEventLoop):
    """Event loop that ends without waiting for a name lookup, which no timeout can interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.set_default_executor(_DaemonThreads())


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own, in any thread."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


class CancellableRunner:
    """Runs coroutines in any threads until `cancel`; running and later ones then raise CancelledError."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock, self.cancelled = threading.Lock(), False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises CancelledError."""
        return run_coroutine(self._run_task(coroutine))

    def cancel(self) -> None:
        """Cancel running coroutines, from any thread."""
        with self._lock:  # an event loop ends after its task has left the set
            self.cancelled = True
            for task in self._tasks:
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def _run_task(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self.cancelled:
                coroutine.close()
                raise asyncio.CancelledError
            self._tasks.add(task)
        try:
            return await coroutine
        finally:
            with self._lock:
                self._tasks.discard(task)


async def request(
    method: str,
    url: str,
    *,
    timeout_s: float,
    largest_bytes: int,
    body: bytes | Path | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    proxies: bool = False,
    silence_s: float | None = None,
) -> tuple[int, bytes]:
    """Status and body of the response; redirects are not followed.

    body: JSON, unless the headers have another type, or a file to send; headers: in addition to the content type;
    proxies: whether to use those of the environment (HTTPS_PROXY, …); silence_s: maximum seconds without a transferred
    byte, None = no limit. Raises TimeoutError after timeout_s in any phase of the request, AnswerTooLargeError, and
    OSError or ClientError for an incomplete response.
    """
    sent = {"Content-Type": "application/json", **headers}
    if isinstance(body, Path):
        sent["Content-Length"] = str(body.stat().st_size)  # otherwise it is sent in chunks, which are slower to read
    connect_s = None if silence_s is None else min(CONNECT_S, silence_s)
    async with (
        AsyncExitStack() as ends,
        asyncio.timeout(silence_s) as silence,
        ClientSession(
            timeout=ClientTimeout(timeout_s, sock_connect=connect_s), headers=sent, trust_env=proxies
        ) as session,
        session.request(
            method,
            URL(url, encoded=True),
            # a file is opened here: aiohttp may drop a generator without closing it
            data=_file_blocks(ends.enter_context(body.open("rb", buffering=0)), silence, silence_s)
            if isinstance(body, Path)
            else body,
            allow_redirects=False,
        ) as response,
    ):
        content = bytearray()
        async for part in response.content.iter_any():
            _extend(silence, silence_s)
            content += part
            if len(content) > largest_bytes:
                raise AnswerTooLargeError(f"the response is larger than {largest_bytes >> 20} MiB")
        return response.status, bytes(content)


async def _file_blocks(file: FileIO, silence: asyncio.Timeout, silence_s: float | None) -> AsyncIterator[bytes]:
    while block := file.read(UPLOAD_BYTES):
        _extend(silence, silence_s)
        yield block


def _extend(silence: asyncio.Timeout, silence_s: float | None) -> None:
    """Restart the silence timeout after a transferred byte."""
    if silence_s is not None:
        silence.reschedule(asyncio.get_running_loop().time() + silence_s)


def failure_reason(error: BaseException) -> str:
    """Why a request failed, as text."""
    if isinstance(error, ClientConnectorError) and not isinstance(error, ClientConnectorDNSError | ClientSSLError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else str(error)
    return str(error) or type(error).__name__


def site_fault(
    url: str, timeout_s: float, environment: Mapping[str, str] = MappingProxyType({}), *, proxies: bool = False
) -> str | None:
    """Why a site cannot be reached within so many seconds; None = it answered.

    environment: with a proxy in it, nothing is tried; proxies: see `request`
    """
    if any(map(environment.get, PROXIES)):
        return None
    try:
        run_coroutine(request("HEAD", url, timeout_s=timeout_s, largest_bytes=1 << 20, proxies=proxies))
    except TimeoutError:
        return f"{url} does not respond within {timeout_s:g} s"
    except (OSError, ClientError, ValueError) as error:
        return f"{url} cannot be reached ({failure_reason(error)})"
    return None


def modelscope_site(environment: Mapping[str, str]) -> str:
    """The address of ModelScope, from the variables that its package reads."""
    site = environment.get("MODELSCOPE_ENDPOINT") or environment.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    return site if "://" in site else f"https://{site}"
