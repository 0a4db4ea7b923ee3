"""Shared request handling: the path prefix, bodies, keys, errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from runner.core.errors import DataError, RunnerError
from runner.spec.base import LOOPBACK
from runner.tinker.requests import MALFORMED, Json, as_runner_error, describe_error
from runner.tinker.state import ServerState, owner_of

log = logging.getLogger("runner")
PREFIX = "/api/v1/"
Handler = Callable[[ServerState, Json, str], Json | None]  # from a body and the owner of the key to the answer


def json_routes(state: ServerState, handlers: Mapping[str, Handler], method: str = "POST") -> list[Route]:
    """Routes whose handlers get a body, with the values in the path and the query, and return the answer."""

    def route(path: str, handle: Handler) -> Route:
        async def answer(request: Request) -> Response:
            body = {} if method in ("GET", "DELETE") else await read_json(request)
            own = {**body, **request.query_params, **request.path_params}
            if key := request.headers.get("x-idempotency-key"):
                own["idempotency_key"] = key
            found = handle(state, own, request.scope["owner"])
            return Response(status_code=204) if found is None else JSONResponse(found)

        return Route(PREFIX + path, answer, methods=[method])

    return [route(path, handle) for path, handle in handlers.items()]


async def read_json(request: Request) -> Json:
    """The body, a JSON object. Raises DataError."""
    try:
        body = await request.json()
    except ValueError as error:
        raise DataError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise DataError("the body is not a JSON object")
    return body


class KeyCheck:
    """ASGI middleware: answers 401 without a key in X-API-Key that is allowed. keys: None = any."""

    def __init__(self, app: ASGIApp, keys: frozenset[str] | None) -> None:
        self._app, self._owners = app, None if keys is None else frozenset(map(owner_of, keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its owner, or refuse it."""
        key = dict(scope.get("headers", ())).get(b"x-api-key", b"").decode("latin-1")
        scope["owner"] = owner_of(key)  # keys are compared by their digests: how long that takes says nothing of them
        is_allowed = bool(key) if self._owners is None else scope["owner"] in self._owners
        if is_allowed or scope["path"] == PREFIX + "healthz":
            await self._app(scope, receive, send)
            return
        await JSONResponse({"error": "the API key is missing or wrong; set TINKER_API_KEY"}, 401)(scope, receive, send)


def make_app(routes: Sequence[Route], keys: frozenset[str] | None) -> Starlette:
    """The routes behind the check of keys and, without keys, of the Host header."""

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # it is not read
        if isinstance(error, HTTPException):
            return JSONResponse({"error": str(error.detail), "category": "user"}, error.status_code)
        status, body = describe_error(as_runner_error(error) if isinstance(error, MALFORMED) else error)
        if status == 500:
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return JSONResponse(body, status)

    kinds = (RunnerError, HTTPException, ClientDisconnect, *MALFORMED, Exception)
    guards = [] if keys is not None else [Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"])]
    middleware = [*guards, Middleware(KeyCheck, keys=keys)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(kinds, refuse))
