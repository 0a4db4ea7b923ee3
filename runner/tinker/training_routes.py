"""The routes that clients train with: sessions, training clients, passes, steps, checkpoints, futures.

Paths and fields are those of Tinker's API, as SDK 0.24 to 0.38 use it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runner.core.errors import DataError
from runner.interfaces.learning import OptimSettings
from runner.tinker.checkpoints import CheckpointPath, LoraSettings, check_name, check_ttl
from runner.tinker.messages import PassRequest, PassResult, SampleResult, decode_pass_request, read_pass_request
from runner.tinker.requests import Operation, Result, failure_json
from runner.tinker.routes import PREFIX, json_routes, read_json
from runner.tinker.state import Json, ServerState

HOLD_S = 30.0  # of a request for a result; clients wait 45 s
PROTOBUF = "application/x-protobuf"
LORA_FLAGS = ("train_attn", "train_mlp", "train_unembed")


def training_routes(state: ServerState) -> list[Route]:
    """The routes, over the state."""
    routes = _TrainingRoutes(state)
    post: dict[str, Callable[[Json, str], Json]] = {
        "client/config": lambda body, owner: {"parallel_fwdbwd_chunks": True},
        "client/dynamic_config": lambda body, owner: {"refresh_interval_sec": 300, "sample_cancel_enabled": False},
        "telemetry": lambda body, owner: {"status": "accepted"},
        "session_heartbeat": routes.heartbeat,
        "create_model": routes.create_model,
        "get_info": routes.get_info,
        "unload_model": routes.unload_model,
        "optim_step": routes.optim_step,
        "save_weights": routes.save_weights,
        "load_weights": routes.load_weights,
        "weights_info": routes.weights_info,
    }
    streaming = {
        "create_session": routes.create_session,
        "sessions/{id}/finish": routes.finish_session,
        "forward_backward": routes.run_pass,
        "forward": routes.run_pass,
        "retrieve_future": routes.retrieve_future,
    }
    return json_routes(post) + [Route(PREFIX + path, one, methods=["POST"]) for path, one in streaming.items()]


class _TrainingRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def create_session(self, request: Request) -> Response:
        body, owner = await read_json(request), request.scope["owner"]
        key = request.headers.get("x-idempotency-key")
        id = self._state.open_session(owner, key, body.get("user_metadata"))
        return JSONResponse({"type": "create_session", "session_id": id})

    def heartbeat(self, body: Json, owner: str) -> Json:
        self._state.session(body["session_id"], owner).seen = time.monotonic()
        return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request) -> Response:
        self._state.end_session(self._state.session(request.path_params["id"], request.scope["owner"]))
        return JSONResponse({})

    def create_model(self, body: Json, owner: str) -> Json:
        state = self._state
        session = state.session(body["session_id"], owner)
        model_id = f"{session.id}:train:{int(body['model_seq_id'])}"

        def prepare() -> Future[Result]:
            state.base.check_name(body["base_model"])
            lora = read_lora(body.get("lora_config"), state.base.alpha)
            return state.create_client(session, model_id, lora, body, "create")

        return state.start(f"{model_id}:0", owner, prepare)

    def get_info(self, body: Json, owner: str) -> Json:
        record, base = self._state.find_client(body["model_id"], owner).record, self._state.base
        data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.name}
        about = {"model_id": record.model_id, "model_name": base.name, "model_data": data}
        return {**about, "type": "get_info", "is_lora": True, "lora_rank": record.lora.rank}

    def unload_model(self, body: Json, owner: str) -> Json:
        model_id = self._state.find_client(body["model_id"], owner).record.model_id
        return self._state.start(f"{model_id}:unload", owner, lambda: self._state.end_client(model_id))

    async def run_pass(self, request: Request) -> Response:
        """A request whose data are wrong has its place in the order, too: those after it would wait for it."""
        if request.headers.get("content-type", "").startswith(PROTOBUF):
            found = await asyncio.to_thread(decode_pass_request, await request.body())
        else:
            body, forward_only = await read_json(request), request.url.path.endswith("/forward")
            found = await asyncio.to_thread(read_pass_request, body, forward_only=forward_only)
        return JSONResponse(self._order_pass(found, request.scope["owner"]))

    def _order_pass(self, found: PassRequest, owner: str) -> Json:
        state, model_id = self._state, found.model_id

        def finish(result: PassResult) -> PassResult:
            if not found.forward_only:
                state.records.add_pass(model_id, result.metrics)
            return result

        def prepare() -> Operation:
            if isinstance(found.data, DataError):
                raise found.data
            size = sum(sum(one.size for one in (datum.ids, *datum.inputs.values())) for datum in found.data)
            if size > state.config.max_request_values:
                text = f"the request has {size} values, above tinker.max_request_values"
                raise DataError(f"{text}={state.config.max_request_values}; send fewer data at once")
            arguments = (model_id, found.data, found.loss_fn, found.config, found.forward_only)
            return Operation("run_pass", arguments, finish)

        return state.order(model_id, found.seq_id, owner, prepare)

    def optim_step(self, body: Json, owner: str) -> Json:
        model_id = body["model_id"]

        def finish(metrics: Mapping[str, float]) -> Json:
            self._state.records.log_step(model_id, metrics)
            return {"type": "optim_step", "metrics": dict(metrics)}

        def prepare() -> Operation:
            return Operation("optim_step", (model_id, read_optim_settings(body)), finish)

        return self._state.order(model_id, body.get("seq_id"), owner, prepare)

    def save_weights(self, body: Json, owner: str) -> Json:
        model_id = body["model_id"]

        def prepare() -> Operation:
            name = body.get("path") or f"{int(body['seq_id']):06d}"
            target = CheckpointPath(model_id, "weights", check_name(name))
            more = (bool(body.get("overwrite")), check_ttl(body.get("ttl_seconds")), body.get("user_metadata"))
            done = {"type": "save_weights", "path": str(target)}
            return Operation("save", (model_id, target, *more), lambda result: done)

        return self._state.order(model_id, body.get("seq_id"), owner, prepare)

    def load_weights(self, body: Json, owner: str) -> Json:
        if body.get("session_id") is not None:
            return self._create_from(body, owner)
        model_id = body["model_id"]

        def prepare() -> Operation:
            source = self._state.checkpoint(body["path"], owner)
            done = {"type": "load_weights", "path": str(source), "model_id": model_id}
            return Operation("load", (model_id, source, bool(body["optimizer"])), lambda result: done)

        return self._state.order(model_id, body.get("seq_id"), owner, prepare)

    def _create_from(self, body: Json, owner: str) -> Json:
        """A training client that continues a checkpoint."""
        state = self._state
        session = state.session(body["session_id"], owner)
        model_id = f"{session.id}:train:{int(body['model_seq_id'])}"

        def prepare() -> Future[Result]:
            if body.get("base_model"):
                state.base.check_name(body["base_model"])
            source = state.checkpoint(body["path"], owner)
            lora = state.store.find_client(source.model_id, owner).lora
            return state.create_client(session, model_id, lora, body, "create_from", (source, bool(body["optimizer"])))

        return state.start(f"{model_id}:0", owner, prepare)

    def weights_info(self, body: Json, owner: str) -> Json:
        source = self._state.checkpoint(body["tinker_path"], owner)
        record = self._state.store.find_client(source.model_id, owner)
        flags = {name: getattr(record.lora, name) for name in LORA_FLAGS}
        return {"base_model": record.base_model, "is_lora": True, "lora_rank": record.lora.rank, **flags}

    async def retrieve_future(self, request: Request) -> Response:
        """Wait for the result; after HOLD_S the client asks again."""
        body, owner = await read_json(request), request.scope["owner"]
        request_id = body["request_id"]
        future = self._state.futures.get(request_id, owner)
        await wait_done(future, HOLD_S)
        if not future.done():
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        self._state.futures.mark_answered(request_id)
        if (error := future.exception()) is not None:
            return JSONResponse(failure_json(error))
        result = future.result()
        if not isinstance(result, PassResult | SampleResult):
            return JSONResponse(dict(result))
        if PROTOBUF in request.headers.get("accept", ""):
            return Response(await asyncio.to_thread(result.to_protobuf), media_type=PROTOBUF)
        return JSONResponse(await asyncio.to_thread(result.to_json))


async def wait_done(future: Future[Result], timeout_s: float) -> None:
    """Wait until the future is done, or for the time; the future is not cancelled then."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server stops
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await done.wait()


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
    defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    values = {name: float(given.get(name, value)) for name, value in defaults.items()}
    values |= {name: float(given.get(name) or 0.0) for name in ("weight_decay", "grad_clip_norm")}
    wrong = [name for name, value in values.items() if not (math.isfinite(value) and value >= 0)]
    wrong += [name for name in ("beta1", "beta2") if values[name] >= 1]
    if wrong:
        raise DataError(f"adam_params: {wrong[0]}={values[wrong[0]]:g} is out of range")
    betas, clip_norm = (values["beta1"], values["beta2"]), values["grad_clip_norm"] or None
    return OptimSettings(values["learning_rate"], betas, values["eps"], values["weight_decay"], clip_norm)
