"""The HTTP server: a Starlette app over an engine, and uvicorn with the bounds that it lacks.

connection ─headers within a deadline, few per client─▶ host, key ─▶ body within size and time ─▶ routes
                                                                answers: each write within a deadline
"""

from __future__ import annotations

import asyncio
import hmac
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runner.core.errors import DataError, EnvironmentProblem, Interrupted, RunnerError
from runner.inference.openai_requests import BadRequest
from runner.inference.openai_routes import error_response, openai_routes
from runner.inference.served_model import ServedModel

LOOPBACK = ("127.0.0.1", "::1", "localhost")
PUBLIC = ("/health",)  # answered without a key


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one client may take. header_s: from the connection, or the first byte of a further request, to the end of
    the headers; body_s: to the end of the body; write_s: until a piece of an answer is read; requests: at once"""

    header_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 60.0
    body_bytes: int = 32 * 2**20
    connections_per_client: int = 256  # of another host
    requests: int = 4096


def create_app(served: ServedModel, *, api_key: str | None = None, limits: ServerLimits | None = None) -> Starlette:
    """The server's app. Without a key, only clients that name this machine in the Host header are answered, so that a
    web page cannot reach it by a name of its own."""
    bounds = limits or ServerLimits()

    async def read_body(request: Request) -> bytes:
        return await _read_body(request, bounds)

    async def refuse(request: Request, error: Exception) -> Response:
        return _error_of(error)

    kinds = (BadRequest, RunnerError, HTTPException, ClientDisconnect, Exception)
    middleware = [Middleware(Bounds, served=served, api_key=api_key, limits=bounds)]
    if api_key is None:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"]))
    return Starlette(
        routes=openai_routes(served, read_body),
        middleware=middleware,
        exception_handlers=dict.fromkeys(kinds, refuse),
    )


def _error_of(error: Exception) -> Response:
    """The answer to a request that failed."""
    if isinstance(error, BadRequest):
        return error_response(str(error), error.status, param=error.param, code=error.code)
    if isinstance(error, HTTPException):
        return error_response(str(error.detail), error.status_code)
    if isinstance(error, DataError):
        return error_response(str(error), 400)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    return error_response(f"{type(error).__name__}: {error}", 500)


async def _read_body(request: Request, limits: ServerLimits) -> bytes:
    """The body of a request. Raises BadRequest for one that is too large or too slow."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadRequest("the header Content-Type: application/json is needed", status=415)
    too_large = BadRequest(f"the body has more than {limits.body_bytes} bytes", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise BadRequest(f"the body took longer than {limits.body_s:g} s", status=408) from None
    return bytes(content)


class Bounds:
    """ASGI middleware: the key, the number of requests at once, and the count of answers."""

    def __init__(self, app: ASGIApp, served: ServedModel, api_key: str | None, limits: ServerLimits) -> None:
        self._app, self._served, self._api_key, self._limits = app, served, api_key, limits
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"]
        app = self._refusal(scope) or self._app

        async def write(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = path if path in KNOWN_PATHS else "other"
                self._served.requests[known, message["status"]] += 1
                if message["status"] in (408, 413):  # the rest of the body is not read
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        self._running += 1
        try:
            await app(scope, receive, write)
        finally:
            self._running -= 1

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["path"] in PUBLIC:
            return None
        if self._api_key is not None:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self._api_key.encode()):
                text = "a wrong API key, or none; send the header Authorization: Bearer KEY"
                return error_response(text, 401, code="invalid_api_key")
        if self._running >= self._limits.requests:
            return error_response(f"{self._running} requests are being answered; try again later", 429)
        return None


KNOWN_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/health", "/metrics")


class BoundedProtocol(H11Protocol):
    """uvicorn's connection with deadlines for headers and for what the client is to read, and a bound for the
    connections of one client."""

    limits: ClassVar[ServerLimits]
    clients: ClassVar[Counter[str]]  # connections by address
    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None
    _address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the client, and give it time for its headers."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self.clients[self._address] += 1
        bound = self.limits.connections_per_client
        if self._address not in LOOPBACK and self.clients[self._address] > bound:
            transport.abort()
            return
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Give a further request of the same connection as much time."""
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self.clients[self._address] -= 1
        if not self.clients[self._address]:
            del self.clients[self._address]
        self._cancel_deadline()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client time to read what was written."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _set_deadline(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the headers are here
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.header_s, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `serve_http`."""
        yield


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet. Raises EnvironmentProblem."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        text = f"cannot listen at {host} port {port}: {error.strerror or error}"
        raise EnvironmentProblem(f"{text}; choose another one: port=8001, or port=0 for any that is free") from error
    return bound


async def serve_http(
    served: ServedModel,
    bound: socket.socket,
    *,
    grace_s: float,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer until a signal, then finish what is in flight within `grace_s`; a second signal ends at once.

    Raises Interrupted after a signal, and what the engine failed with once its requests have been answered with 500.
    """
    bounds = limits or ServerLimits()
    _raise_file_limit()
    protocol = type("Protocol", (BoundedProtocol,), {"limits": bounds, "clients": Counter()})
    config = uvicorn.Config(
        create_app(served, api_key=api_key, limits=bounds),
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(grace_s)),
        backlog=1024,
    )
    server, received, loop = _Server(config), list[int](), asyncio.get_running_loop()

    def stop(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(128 + number)
        print(
            f"\n{signal.Signals(number).name}: finishing {served.client.num_requests} answers within {grace_s:g} s; "
            "send it again to stop immediately",
            flush=True,
        )
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    async with _ends_with_engine(served, server):
        bound.listen(config.backlog)
        on_ready()
        await server.serve([bound])
    if served.client.failure is not None:
        raise served.client.failure
    if received:
        raise Interrupted(received[0], f"{signal.Signals(received[0]).name}: the server has ended")


@asynccontextmanager
async def _ends_with_engine(served: ServedModel, server: uvicorn.Server) -> AsyncIterator[None]:
    """While the block runs, the server ends when the engine does."""

    async def end() -> None:
        await served.client.failed.wait()
        server.should_exit = True

    task = asyncio.create_task(end())
    try:
        yield
    finally:
        task.cancel()


def _raise_file_limit() -> None:
    """Let this process have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
