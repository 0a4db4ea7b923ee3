"""The OpenAI routes: models, completions, chat completions; and /tokenize, /health, /metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from runner.core.errors import DataError, RunnerError
from runner.inference.http import error_response
from runner.inference.openai_answers import ChatCompletions, Completions
from runner.inference.openai_requests import BadRequest, ChatBody, CompletionBody, Json, TokenizeBody, parse_body
from runner.inference.served_model import ServedModel

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)


async def while_connected(served: ServedModel, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which ends where the client goes. Raises ClientDisconnect then."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        served.cancelled.inc()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event_stream(served: ServedModel, chunks: AsyncGenerator[Json, None]) -> StreamingResponse:
    """Server-sent events: each chunk, then [DONE]. An error after the first byte is an event, too."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except RunnerError as error:
            content = bytes(error_response(400 if isinstance(error, DataError) else 500, str(error)).body).decode()
            yield f"data: {content}\n\n"
        except asyncio.CancelledError:
            served.cancelled.inc()
            raise
        finally:
            await chunks.aclose()
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def read_body(served: ServedModel, request: Request, kind: type[B]) -> B:
    """The body of a request. Raises BadRequest, also where its content type is not JSON.

    A web page of another site can send no JSON without a preflight request of the browser.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadRequest("the header Content-Type: application/json is required", status=415)
    content = await request.body()
    return await served.in_thread(lambda: parse_body(kind, content))


def openai_routes(served: ServedModel) -> list[Route]:
    """The routes over one model."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_json(served, name) for name in served.names]})

    async def model(request: Request) -> Response:
        served.adapter(name := request.path_params["name"])
        return JSONResponse(_model_json(served, name))

    async def completions(request: Request) -> Response:
        body = served.with_run_stops(await read_body(served, request, CompletionBody))
        adapter = served.adapter(body.model)
        prompts = await served.in_thread(
            lambda: [served.encode(p) if isinstance(p, str) else tuple(p) for p in body.prompts()]
        )
        return await _answer(request, Completions(served, body, prompts, adapter))

    async def chat(request: Request) -> Response:
        body = served.with_run_stops(await read_body(served, request, ChatBody))
        adapter = served.adapter(body.model)
        prompt = await served.in_thread(lambda: served.render(*body.conversation()))
        return await _answer(request, ChatCompletions(served, body, prompt.ids, prompt.is_thinking, adapter))

    async def _answer(request: Request, work: Completions | ChatCompletions) -> Response:
        if work.body.stream:
            if served.client.failure is not None:
                raise served.client.failure
            return event_stream(served, work.chunks())
        content = await while_connected(served, request, work.whole())
        return await served.in_thread(lambda: JSONResponse(content))

    async def tokenize(request: Request) -> Response:
        body = await read_body(served, request, TokenizeBody)
        if body.model is not None:
            served.adapter(body.model)
        if body.messages is not None:
            ids = (await served.in_thread(lambda: served.render(*body.conversation()))).ids
        else:
            ids = await served.in_thread(lambda: served.encode(body.prompt or "", body.add_special_tokens))
        tokens, limit = served.vocabulary_ids(ids), served.info.length_limit
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def health(request: Request) -> Response:
        if (failure := served.client.failure) is not None:
            return error_response(503, str(failure))
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(served.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]


def _model_json(served: ServedModel, name: str) -> Json:
    parent = served.info.name if name in served.info.adapters and name != served.info.name else None
    about = {"id": name, "object": "model", "created": served.created, "owned_by": "run", "parent": parent}
    return {**about, "max_model_len": served.info.length_limit}
