"""The HTTP server of `run serve`: a Starlette app over an engine; ends with the engine or by a signal.

connection ─HttpLimits─▶ Admission ─▶ Host header, or key ─▶ routes ─▶ engine
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.core.errors import DataError, Interrupted, RunnerError
from runner.core.subprocess import ChildProcess
from runner.inference.engine_client import EngineClient
from runner.inference.engine_process import EngineInfo, EngineSettings
from runner.inference.http import HttpLimits, TokenCheck, error_response, listen, make_server
from runner.inference.openai_requests import BadRequest
from runner.inference.openai_routes import openai_routes
from runner.inference.serve import ServeSettings
from runner.inference.served_model import ServedModel
from runner.inference.weight_routes import weight_routes

OPEN_PATHS = frozenset({"/health"})  # answered without a key
MAX_REQUESTS = 4096  # in flight at once
SWITCH_INTERVAL_S = 1e-4  # the event loop gets the interpreter from the thread that renders prompts
LIMITS = HttpLimits(max_body_bytes=32 << 20)


def create_app(
    served: ServedModel,
    *,
    api_key: str | None = None,
    weight_updates: bool = False,
    routes: Sequence[BaseRoute] | None = None,
) -> Starlette:
    """The server's app. routes: instead of those of `openai_routes`

    Without a key, only clients that name this machine in the Host header are answered, so that a web page cannot reach
    it by a name of its own. weight_updates: with the routes of `weight_routes`
    """

    async def refuse(request: Request, error: Exception) -> Response:
        return _error_of(error)

    guard = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    if api_key is not None:
        guard = Middleware(TokenCheck, token=api_key, open_paths=OPEN_PATHS)
    kinds = (BadRequest, RunnerError, HTTPException, ClientDisconnect, Exception)
    return Starlette(
        routes=routes or openai_routes(served) + (weight_routes(served) if weight_updates else []),
        middleware=[Middleware(Admission, served=served), guard],
        exception_handlers=dict.fromkeys(kinds, refuse),
    )


def _error_of(error: Exception) -> Response:
    """The answer to a request that failed."""
    if isinstance(error, BadRequest):
        return error_response(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, HTTPException):
        return error_response(error.status_code, str(error.detail))
    if isinstance(error, DataError):
        return error_response(400, str(error))
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # it is not read
    return error_response(500, f"{type(error).__name__}: {error}")


class Admission:
    """ASGI middleware: answers 429 above MAX_REQUESTS at once, and counts answers by path and status."""

    def __init__(self, app: ASGIApp, served: ServedModel) -> None:
        self._app, self._served, self._running = app, served, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        path = scope["path"]
        app: ASGIApp = self._app
        if self._running >= MAX_REQUESTS and path not in OPEN_PATHS:
            app = error_response(429, f"{self._running} requests are running; try again later")

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # not the path, of which there may be any number
                self._served.requests.labels(getattr(route, "path", "other"), message["status"]).inc()
            await send(message)

        self._running += 1
        try:
            await app(scope, receive, count_and_send)
        finally:
            self._running -= 1


async def run_server(model: EngineSettings, settings: ServeSettings, api_key: str | None) -> None:
    """Load the model and answer until a signal; then finish what is in flight.

    A second signal ends at once. Raises Interrupted after a signal, and what the engine failed with once its requests
    have been answered with 500.
    """
    received, loop = list[int](), asyncio.get_running_loop()
    server: uvicorn.Server | None = None

    def stop(number: int) -> None:
        received.append(number)
        if server is None:
            loading.cancel()
            return
        if len(received) > 1:
            os._exit(128 + number)
        text = f"finishing {served.client.num_requests} requests within {settings.grace_s:g} s"
        print(f"{signal.Signals(number).name}: {text}; send it again to stop immediately", file=sys.stderr, flush=True)
        server.should_exit = True

    async with AsyncExitStack() as ends:
        loading = asyncio.ensure_future(_start_engine(model, settings, ends))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            served = await loading
        except asyncio.CancelledError:
            if not received:
                raise
            raise Interrupted(received[0], f"{signal.Signals(received[0]).name} during the load of the model") from None
        listener = ends.enter_context(listen(settings.host, settings.port))
        _raise_file_limit()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        app = create_app(served, api_key=api_key, weight_updates=settings.weight_updates)
        server = make_server(app, LIMITS, grace_s=max(1, round(settings.grace_s)))
        server.should_exit = bool(received)  # a signal came after the load
        _print_ready(served.info, settings.model_copy(update={"port": listener.getsockname()[1]}), api_key)
        serving = asyncio.create_task(server.serve([listener]))
        failing = asyncio.create_task(served.client.failed.wait())
        await asyncio.wait([serving, failing], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        failing.cancel()
        if served.client.failure is not None:
            raise served.client.failure
    raise Interrupted(received[0], f"{signal.Signals(received[0]).name}: the server stopped")


async def _start_engine(model: EngineSettings, settings: ServeSettings, ends: AsyncExitStack) -> ServedModel:
    """The model, loaded in a child process that ends with `ends`."""
    folder = Path(tempfile.gettempdir(), f"run-serve-{secrets.token_hex(8)}")  # the child's, for the tokenizer
    ends.callback(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "runner.inference.engine_process", model.model_dump_json(), str(folder)]
    child = ChildProcess(command, end_signal=signal.SIGKILL, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ends.callback(child.stop, settings.grace_s)
    assert child.stdin is not None and child.stdout is not None
    writing = os.dup(child.stdin.fileno())
    child.stdin.close()
    client = await EngineClient.connect(child.stdout.fileno(), writing)
    ends.push_async_callback(client.close)
    info = await client.wait_ready()
    tokenizer = await asyncio.to_thread(_load_tokenizer, folder)
    return ServedModel(info, tokenizer, client, settings.logprobs_mode)


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer that the engine's process has written; its folder is removed."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return tokenizer


def _print_ready(info: EngineInfo, settings: ServeSettings, api_key: str | None) -> None:
    names = ", ".join(dict.fromkeys([info.name, *info.adapters]))
    step = "" if info.step is None else f", step {info.step}"
    key = "no key needed" if api_key is None else "with the key of --api-key-file"
    print(f"{names}{step}: {settings.url}/v1 ({key}; Ctrl-C ends it)", flush=True)


def _raise_file_limit() -> None:
    """Let this process have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
