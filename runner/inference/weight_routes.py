"""Routes that replace the served weights: vLLM's, which `sampler.weight_sync=reload` calls.

    POST /collective_rpc       {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}
    POST /reset_prefix_cache   nothing is kept of older weights

They exist with weight_updates=true, behind a key: whoever has it can replace the model by any folder that the server
reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runner.inference.openai_requests import BadRequest, parse_body
from runner.inference.served_model import ServedModel


class ReloadArguments(BaseModel):
    """weights_path: a folder with a config and safetensors."""

    model_config = ConfigDict(extra="forbid")
    weights_path: str


class ReloadBody(BaseModel):
    """The body of /collective_rpc."""

    model_config = ConfigDict(extra="forbid")
    method: Literal["reload_weights"]
    kwargs: ReloadArguments


def weight_routes(served: ServedModel) -> list[Route]:
    """The routes over one model."""

    async def reload(request: Request) -> Response:
        body = parse_body(ReloadBody, await request.body())
        if served.client.num_requests:
            text = f"{served.client.num_requests} requests are running; weights are loaded between requests"
            raise BadRequest(text, status=409)
        await served.client.load(Path(body.kwargs.weights_path))
        return JSONResponse({"results": [None]})

    async def reset(request: Request) -> Response:
        return JSONResponse({"success": True})

    return [
        Route("/collective_rpc", reload, methods=["POST"]),
        Route("/reset_prefix_cache", reset, methods=["POST"]),
    ]
