"""Routes of training clients: sessions, forward_backward, optim_step, checkpoints, futures.

Paths and fields are those of Tinker's API, as SDK 0.24 to 0.38 use it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runner.core.errors import DataError
from runner.interfaces.learning import OptimSettings
from runner.tinker.checkpoints import CheckpointPath, LoraSettings, expiry
from runner.tinker.messages import PassRequest, PassResult, SampleResult, decode_pass_request, read_pass_request
from runner.tinker.requests import Json, Operation, describe_error
from runner.tinker.routes import PREFIX, Handler, json_routes, read_json
from runner.tinker.state import ServerState, client_id

HOLD_S = 30.0  # of a request for a result; clients wait 45 s
PROTOBUF = "application/x-protobuf"
LORA_FLAGS = ("train_attn", "train_mlp", "train_unembed")
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def training_routes(state: ServerState) -> list[Route]:
    """The routes, over the state."""
    post: dict[str, Handler] = {
        "client/config": lambda state, body, owner: {"parallel_fwdbwd_chunks": True},
        "client/dynamic_config": lambda state, body, owner: {"sample_cancel_enabled": False},
        "telemetry": lambda state, body, owner: {"status": "accepted"},
        "create_session": create_session,
        "session_heartbeat": record_heartbeat,
        "sessions/{id}/finish": finish_session,
        "create_model": create_model,
        "get_info": get_info,
        "optim_step": in_order(optim_step),
        "save_weights": in_order(save_weights),
        "load_weights": load_weights,
        "weights_info": weights_info,
    }
    other = {"forward_backward": run_pass, "forward": run_pass, "retrieve_future": retrieve_future}
    routes = [Route(PREFIX + path, partial(answer, state), methods=["POST"]) for path, answer in other.items()]
    return json_routes(state, post) + routes


def in_order(prepare: Callable[[ServerState, Json, str], Operation]) -> Handler:
    """A handler that queues the operations of a training client by their numbers."""

    def handle(state: ServerState, body: Json, owner: str) -> Json:
        return state.order(body["model_id"], body.get("seq_id"), owner, partial(prepare, state, body, owner))

    return handle


def create_session(state: ServerState, body: Json, owner: str) -> Json:
    """Open a session."""
    id = state.open_session(owner, body.get("idempotency_key"), body.get("user_metadata"))
    return {"type": "create_session", "session_id": id}


def record_heartbeat(state: ServerState, body: Json, owner: str) -> Json:
    """Keep a session alive."""
    state.session(body["session_id"], owner).last_seen = time.monotonic()
    return {"type": "session_heartbeat"}


def finish_session(state: ServerState, body: Json, owner: str) -> Json:
    """End a session."""
    state.end_session(state.session(body["id"], owner))
    return {}


def create_model(state: ServerState, body: Json, owner: str) -> Json:
    """Add a training client with a fresh LoRA or, where the request has a path, with that of a checkpoint."""
    session, path = state.session(body["session_id"], owner), body.get("path")

    def prepare() -> Operation:
        if path is None or body.get("base_model"):
            state.base.check_name(body["base_model"])
        if path is None:
            return state.create_client(session, body, read_lora(body.get("lora_config"), state.base.alpha))
        source, record = state.checkpoint(path, owner)
        return state.create_client(session, body, record.lora, source)

    return state.start(f"{client_id(session, body)}:0", owner, prepare)


def get_info(state: ServerState, body: Json, owner: str) -> Json:
    """Describe a training client."""
    record, base = state.training_client(body["model_id"], owner).record, state.base
    name = base.loadable_name
    data = {"arch": base.architecture, "model_name": name, "tokenizer_id": base.name}
    about = {"model_id": record.model_id, "model_name": name, "model_data": data}
    return {**about, "type": "get_info", "is_lora": True, "lora_rank": record.lora.rank}


async def run_pass(state: ServerState, request: Request) -> Response:
    """Queue forward_backward, or forward."""
    if request.headers.get("content-type", "").startswith(PROTOBUF):
        found = decode_pass_request(await request.body())
    else:
        found = read_pass_request(await read_json(request), forward_only=request.url.path.endswith("/forward"))
    prepare = partial(prepare_pass, state, found)
    return JSONResponse(state.order(found.model_id, found.seq_id, request.scope["owner"], prepare))


def prepare_pass(state: ServerState, found: PassRequest) -> Operation:
    """The operation of forward_backward, and of forward."""

    def finish(result: PassResult) -> PassResult:
        if not found.forward_only:
            state.records.add_pass(found.model_id, result.metrics)
        return result

    data, most = found.read_data(), state.config.max_request_values
    if (size := sum(sum(one.size for one in (datum.ids, *datum.inputs.values())) for datum in data)) > most:
        text = f"the request has {size} values, above tinker.max_request_values={most}"
        raise DataError(f"{text}; send fewer data at once")
    return Operation("run_pass", (found.model_id, data, found.loss_fn, found.config, found.forward_only), finish)


def optim_step(state: ServerState, body: Json, owner: str) -> Operation:
    """The operation of an optimizer step."""

    def finish(metrics: Mapping[str, float]) -> Json:
        state.records.log_step(body["model_id"], metrics)
        return {"type": "optim_step", "metrics": metrics}

    return Operation("optim_step", (body["model_id"], read_optim_settings(body)), finish)


def save_weights(state: ServerState, body: Json, owner: str) -> Operation:
    """The operation that saves a training client."""
    target = CheckpointPath(body["model_id"], "weights", body.get("path") or f"{int(body['seq_id']):06d}")
    more = (bool(body.get("overwrite")), expiry(body.get("ttl_seconds")), body.get("user_metadata"))
    return Operation("save", (target, *more), {"type": "save_weights", "path": str(target)})


def load_weights(state: ServerState, body: Json, owner: str) -> Json | None:
    """Load a checkpoint into a training client, or with a session add one that continues it."""
    handle = create_model if body.get("session_id") else in_order(prepare_load)
    return handle(state, body, owner)


def prepare_load(state: ServerState, body: Json, owner: str) -> Operation:
    """The operation that loads a checkpoint into a training client."""
    model_id, (source, _) = body["model_id"], state.checkpoint(body["path"], owner)
    done = {"type": "load_weights", "path": str(source), "model_id": model_id}
    return Operation("load", (model_id, source, bool(body["optimizer"])), done)


def weights_info(state: ServerState, body: Json, owner: str) -> Json:
    """Describe what a checkpoint was trained as."""
    _, record = state.checkpoint(body["tinker_path"], owner)
    flags = {name: getattr(record.lora, name) for name in LORA_FLAGS}
    return {"base_model": record.base_model, "is_lora": True, "lora_rank": record.lora.rank, **flags}


async def retrieve_future(state: ServerState, request: Request) -> Response:
    """Wait for a result; after HOLD_S the client asks again."""
    request_id = (await read_json(request))["request_id"]
    future = state.futures.get(request_id, request.scope["owner"])
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    with suppress(TimeoutError):  # the future is not cancelled then
        await asyncio.wait_for(done.wait(), HOLD_S)
    if not future.done():
        return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
    state.futures.mark_answered(request_id)
    if (error := future.exception()) is not None:
        return JSONResponse(describe_error(error)[1])
    result = future.result()
    if not isinstance(result, PassResult | SampleResult):
        return JSONResponse(result)
    if PROTOBUF in request.headers.get("accept", ""):
        return Response(result.to_protobuf(), media_type=PROTOBUF)
    return JSONResponse(result.to_json())


def read_lora(given: Json | None, alpha: float) -> LoraSettings:
    """The LoRA of a request; without a seed a random one. Raises DataError."""
    if given is None or not given.get("rank"):
        raise DataError("full fine-tuning is not supported by this server; create a LoRA client with a rank")
    rank, seed = int(given["rank"]), given.get("seed")
    if not 1 <= rank <= 1024:
        raise DataError(f"rank={rank}: expected 1 to 1024")
    flags = {name: bool(given.get(name, True)) for name in LORA_FLAGS}
    return LoraSettings(rank, secrets.randbelow(1 << 31) if seed is None else int(seed), alpha, **flags)


def read_optim_settings(body: Json) -> OptimSettings:
    """AdamW's settings of a request. Raises DataError for other optimizers and wrong values."""
    given = body.get("adam_params")
    if given is None:
        kind = (body.get("optimizer_params") or {}).get("type")
        raise DataError(f"optimizer '{kind}' is not supported; send AdamParams")
    values = {name: float(given.get(name, default)) for name, default in ADAM.items()}
    wrong = [name for name, value in values.items() if not (math.isfinite(value) and value >= 0)]
    wrong += [name for name in ("beta1", "beta2") if values[name] >= 1]
    if wrong:
        raise DataError(f"adam_params: {wrong[0]}={values[wrong[0]]:g} is out of range")
    lr, beta1, beta2, eps, weight_decay, clip_norm = values.values()
    return OptimSettings(lr, (beta1, beta2), eps, weight_decay, clip_norm or None)
