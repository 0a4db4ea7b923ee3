"""Serve an ASGI application by uvicorn, with limits and a token check that uvicorn does not have.

listen(host, port) ─▶ socket ─▶ make_server(app, limits).serve([socket])     in this thread's event loop
                             └▶ serve_in_thread(app, socket, limits)         beside a thread that computes
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runner.core.errors import EnvironmentProblem

BACKLOG = 2048  # connections that the kernel holds before they are accepted


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may take.

    max_body_bytes: of one request; header_timeout_s: from a connection's first byte to the end of the headers;
    idle_timeout_s: without a byte of a body, in either direction; connections_per_client: of one address at once;
    drain_s: for the rest of a body that is answered before it was read
    """

    max_body_bytes: int = 64 << 20
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    connections_per_client: int = 2048
    drain_s: float = 5.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = any free one. Raises EnvironmentProblem if the address is unavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        text = f"cannot listen at {http_url(host, port)}: {error.strerror or error}"
        raise EnvironmentProblem(f"{text}; set an address of this machine and a free port") from error
    # Connections inherit it. uvicorn writes headers and body apart, so the body would wait 40 ms for the client's ACK;
    # asyncio sets it only where a socket says that its protocol is TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def http_url(host: str, port: int) -> str:
    """The URL of an address, an IPv6 one in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


Periodic = tuple[int, Callable[[], Awaitable[None]]]  # seconds, and what the event loop runs that often


def make_server(app: ASGIApp, limits: HttpLimits, *, grace_s: int, every: Periodic | None = None) -> uvicorn.Server:
    """A uvicorn server of `app`, which `should_exit` ends, and no signal.

    grace_s: seconds that requests in flight have then
    """
    seconds, work = every or (0, None)
    protocol = type("LimitedProtocol", (_LimitedProtocol,), {"limits": limits, "clients": Counter[str]()})
    config = uvicorn.Config(
        _LimitBodies(app, limits),
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        timeout_notify=seconds,
        callback_notify=work,
    )
    return _ServerWithoutSignals(config)


class _ServerWithoutSignals(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: those of the process stay."""
        yield


@contextmanager
def serve_in_thread(
    app: ASGIApp, listener: socket.socket, limits: HttpLimits, *, every: Periodic | None = None
) -> Iterator[None]:
    """Answer requests in a separate thread while the block runs; its end cancels what is in flight."""
    server = make_server(app, limits, grace_s=1, every=every)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


class TokenCheck:
    """ASGI middleware: answers 401 without `Authorization: Bearer TOKEN`. open_paths need no token."""

    def __init__(self, app: ASGIApp, token: str, open_paths: frozenset[str] = frozenset()) -> None:
        self._app, self._expected, self._open_paths = app, f"Bearer {token}".encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["path"] in self._open_paths or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        text = "the token is missing or wrong; send the header Authorization: Bearer TOKEN"
        refusal = error_response(401, text, "authentication_error", code="invalid_api_key")
        await refusal(scope, receive, send)


def error_response(
    status: int, message: str, kind: str | None = None, *, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """An error in the shape of OpenAI's API. param: the field of the body that is wrong."""
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code or status}}, status)


class _LimitBodies:
    """ASGI middleware: bounds a request's body, and the time that a client may neither send nor read."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, received, complete = self._limits, 0, False
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if int(length) > limits.max_body_bytes:
            refusal = error_response(413, f"the body is above {limits.max_body_bytes} bytes")
            refusal.headers["Connection"] = "close"  # the rest of the body is not read
            await refusal(scope, receive, send)
            return

        async def bounded_receive() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()  # of the disconnection, which has no deadline
            try:
                async with asyncio.timeout(limits.idle_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"no byte of the body in {limits.idle_timeout_s:g} s") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > limits.max_body_bytes:
                raise HTTPException(413, f"the body is above {limits.max_body_bytes} bytes")
            return message

        async def bounded_send(message: Message) -> None:
            async with asyncio.timeout(limits.idle_timeout_s):
                await send(message)

        await self._app(scope, bounded_receive, bounded_send)


class _DrainingTransport:
    """uvicorn's transport, whose `close` ends the connection as the protocol decides."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close
        self.is_draining = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether the last byte to send has been written."""
        return self.is_draining or self._transport.is_closing()


class _LimitedProtocol(H11Protocol):
    """uvicorn's connection, closed where headers take too long or one client has too many connections.

    A socket that is closed before it was read to its end resets the connection, and the client may lose the answer. So
    where a request was not read whole, only our direction is closed, and the rest is read and dropped within `drain_s`.
    """

    limits: ClassVar[HttpLimits]
    clients: ClassVar[Counter[str]]  # connections by address
    _timer: asyncio.TimerHandle | None = None  # until headers are complete, or a body is drained

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        self._draining = _DrainingTransport(transport, self._close)
        super().connection_made(self._draining)  # type: ignore[arg-type]
        self._host = self.client[0] if self.client else ""
        self.clients[self._host] += 1
        if self.clients[self._host] > self.limits.connections_per_client:
            transport.abort()
        else:
            self._start_timer(self.limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._draining.is_draining:
            return
        was_unread = self._is_body_unread()
        super().data_received(data)
        if self._draining.is_draining or self._is_body_unread():
            return
        if was_unread or self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer(self.limits.header_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_body_unread():  # uvicorn drops the rest of it, and keeps the connection
            self._start_timer(self.limits.drain_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.clients[self._host] -= 1
        if not self.clients[self._host]:
            del self.clients[self._host]
        super().connection_lost(exc)

    def _is_body_unread(self) -> bool:
        """Whether the response is complete, and the request's body is not."""
        return bool(self.cycle and self.cycle.response_complete) and self.conn.their_state is h11.SEND_BODY

    def _close(self) -> None:
        """End the connection: at once, or after the rest of a request."""
        if self._draining.is_draining:
            return
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR) and not self.conn.trailing_data[0]:
            self._socket.close()
            return
        self._draining.is_draining = True
        self._socket.write_eof()
        self._socket.resume_reading()
        self._start_timer(self.limits.drain_s)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._socket.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
