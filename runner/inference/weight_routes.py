"""Routes that replace the served weights: vLLM's, which `sampler.weight_sync=reload|adapter` calls.

    POST /collective_rpc          {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}
    POST /v1/load_lora_adapter    {"lora_name": NAME, "lora_path": FOLDER}
    POST /v1/unload_lora_adapter  {"lora_name": NAME}
    POST /reset_prefix_cache      nothing is kept of older weights

They exist with weight_updates=true only, and need the key: a client that has it can replace the model by any folder
that the server can read. They work between requests only.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runner.inference.openai_requests import BadRequest, StrictBody
from runner.inference.openai_routes import read_body
from runner.inference.served_model import ServedModel


class ReloadArguments(StrictBody):
    """weights_path: a folder with a config and safetensors."""

    weights_path: str


class ReloadBody(StrictBody):
    """The body of /collective_rpc."""

    method: Literal["reload_weights"]
    kwargs: ReloadArguments


class UnloadAdapterBody(StrictBody):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)


class LoadAdapterBody(UnloadAdapterBody):
    """The body of /v1/load_lora_adapter. lora_path: a folder as PEFT writes it."""

    lora_path: str = Field(min_length=1)


def weight_routes(served: ServedModel) -> list[Route]:
    """The routes over one model."""

    async def reload(request: Request) -> Response:
        body = await read_body(served, request, ReloadBody)
        await served.client.call("load_weights", body.kwargs.weights_path)
        return JSONResponse({"results": [None]})

    async def load_adapter(request: Request) -> Response:
        body = await read_body(served, request, LoadAdapterBody)
        if body.lora_name in served.names:
            raise BadRequest(f"'{body.lora_name}' is the name of a model that is served", param="lora_name")
        await served.client.call("load_adapter", body.lora_name, body.lora_path)
        served.info = served.info.model_copy(update={"adapters": (*served.info.adapters, body.lora_name)})
        return JSONResponse({"success": True})

    async def unload_adapter(request: Request) -> Response:
        name = (await read_body(served, request, UnloadAdapterBody)).lora_name
        await served.client.call("unload_adapter", name)
        served.info = served.info.model_copy(
            update={"adapters": tuple(one for one in served.info.adapters if one != name)}
        )
        return JSONResponse({"success": True})

    async def reset(request: Request) -> Response:
        return JSONResponse({"success": True})

    posts = {
        "/collective_rpc": reload,
        "/v1/load_lora_adapter": load_adapter,
        "/v1/unload_lora_adapter": unload_adapter,
        "/reset_prefix_cache": reset,
    }
    return [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
