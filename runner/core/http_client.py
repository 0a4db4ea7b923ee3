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

P = ParamSpec("P")
T = TypeVar("T")
CONNECT_S = 5.0  # for a connection, where silence has a deadline
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # what lies behind one is not seen from here
UPLOAD_BYTES = 1 << 20  # of a file, between two looks at the clock


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


class CancellableRunner:
    """Runs coroutines to their end in any threads, until `cancel`.

    After it those under way, and every later one, raise CancelledError.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock, self.cancelled = threading.Lock(), False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises CancelledError."""
        return run_coroutine(self._run_task(coroutine))

    def cancel(self) -> None:
        """Cancel what is under way, from any thread."""
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

    body: JSON, unless the headers say otherwise, or a file to send; headers: beside its type; proxies: whether those of
    the environment (HTTPS_PROXY, …) are used; silence_s: most seconds in which no byte moves, None = no such limit.
    Raises TimeoutError after timeout_s, wherever the request is by then, AnswerTooLargeError, and OSError or
    ClientError where there is no whole answer.
    """
    sent = {"Content-Type": "application/json", **headers}
    if isinstance(body, Path):
        sent["Content-Length"] = str(body.stat().st_size)  # else it is sent in chunks, which cost more to read
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
    """A byte has moved: the deadline of silence begins again."""
    if silence_s is not None:
        silence.reschedule(asyncio.get_running_loop().time() + silence_s)


def failure_reason(error: BaseException) -> str:
    """Why there is no answer, in words."""
    if isinstance(error, ClientConnectorError) and not isinstance(error, ClientConnectorDNSError | ClientSSLError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else str(error)
    return str(error) or type(error).__name__


def site_fault(url: str, timeout_s: float, environment: Mapping[str, str]) -> str | None:
    """Why a site cannot be reached within so many seconds; None = nothing is known against it."""
    if any(map(environment.get, PROXIES)):
        return None
    try:
        run_coroutine(request("HEAD", url, timeout_s=timeout_s, largest_bytes=1 << 20))
    except TimeoutError:
        return f"{url} does not respond within {timeout_s:g} s"
    except (OSError, ClientError, ValueError) as error:
        return f"{url} cannot be reached ({failure_reason(error)})"
    return None
