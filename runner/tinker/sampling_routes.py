"""The routes that clients sample with: sampler weights, sampling sessions, samples."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from starlette.routing import Route

from runner.core.errors import DataError
from runner.inference.engine import SamplingParams
from runner.interfaces import ModelLimits
from runner.tinker.checkpoints import UNNAMED, UNNAMED_S, CheckpointPath, CheckpointRecord, check_name, check_ttl
from runner.tinker.messages import read_model_input
from runner.tinker.requests import Operation, Result
from runner.tinker.routes import json_routes
from runner.tinker.service import SampleRequest
from runner.tinker.state import Json, SamplerHandle, ServerState

MOST_SAMPLES = 4096  # of one prompt
MOST_TOP = 1024  # likeliest tokens of a position
UNSUPPORTED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n", "record_stability_info")


def sampling_routes(state: ServerState) -> list[Route]:
    """The routes, over the state."""
    routes = _SamplingRoutes(state)
    post = {
        "save_weights_for_sampler": routes.save_weights_for_sampler,
        "create_sampling_session": routes.create_sampling_session,
        "asample": routes.sample,
    }
    get = {
        "healthz": lambda body, owner: {"status": "ok"},
        "get_server_capabilities": routes.capabilities,
    }
    return json_routes(post) + json_routes(get, "GET")


class _SamplingRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def save_weights_for_sampler(self, body: Json, owner: str) -> Json:
        state, model_id = self._state, body["model_id"]
        client = state.find_client(model_id, owner)

        def prepare() -> Operation:
            name, number = body.get("path"), body.get("sampling_session_seq_id")
            target = CheckpointPath(
                model_id, "sampler_weights", check_name(name or f"{UNNAMED}{int(body['seq_id']):06d}")
            )
            more = (check_ttl(body.get("ttl_seconds")) if name else UNNAMED_S, body.get("user_metadata"))
            if name is not None:
                done = {"type": "save_weights_for_sampler", "path": str(target)}
                return Operation("save", (model_id, target, False, *more), lambda result: done)
            follows = model_id if body.get("kind", "snapshot") == "inflight" else None
            if number is None:
                raise DataError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
            session = state.session(model_id.partition(":")[0], owner)
            sampler = state.add_sampler(session, int(number), target, follows)
            done = {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}
            if follows is None:
                return Operation("save", (model_id, target, False, *more), lambda result: done)

            def finish(result: Any) -> Json:
                client.inflight = target
                return done

            return Operation("publish", (model_id, target, inflight_key(model_id), *more), finish)

        return state.order(model_id, body.get("seq_id"), owner, prepare)

    def create_sampling_session(self, body: Json, owner: str) -> Json:
        session, path = self._state.session(body["session_id"], owner), body.get("model_path")
        if path is None:
            self._state.base.check_name(body.get("base_model") or "")
        source = None if path is None else self._state.checkpoint(path, owner)
        sampler = self._state.add_sampler(session, int(body["sampling_session_seq_id"]), source)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def sample(self, body: Json, owner: str) -> Json:
        sampler = self._state.sampler(body.get("sampling_session_id") or "", owner)
        request_id, count = f"{sampler.id}:{int(body['seq_id'])}", int(body.get("num_samples", 1))

        def prepare() -> Future[Result]:
            request = read_sample_request(request_id, body, self._state.base.limits)
            return self._state.submit(request, *self._weights(sampler))

        started = self._state.start(request_id, owner, prepare)
        return {**started, "sample_sequence_ids": [f"{request_id}:{number}" for number in range(count)]}

    def _weights(self, sampler: SamplerHandle) -> tuple[CheckpointPath | None, str | None]:
        """The checkpoint that a sampler samples from, and what the engine calls it."""
        if sampler.follows is None:
            source = sampler.source
            return source, None if source is None else sampler_key(source, self._state.store.record(source))
        client = self._state.clients.get(sampler.follows)
        newest = None if client is None else client.inflight
        return newest or sampler.source, inflight_key(sampler.follows)

    def capabilities(self, body: Json, owner: str) -> Json:
        base = self._state.base
        longest = base.limits.length_limit and base.limits.length_limit[0]
        about = {"max_context_length": longest, "trainable": True, "sampleable": True}
        names = dict.fromkeys((base.name, *base.aliases))
        return {"supported_models": [{"model_name": name, **about} for name in names]}


def sampler_key(source: CheckpointPath, record: CheckpointRecord) -> str:
    """What the engine calls a checkpoint's weights; its path alone may have had others before."""
    return f"{source}#{record.digest}"


def inflight_key(model_id: str) -> str:
    """What the engine calls the weights that the samplers of a training client share."""
    return f"{model_id}/inflight"


def read_sample_request(request_id: str, body: Json, limits: ModelLimits) -> SampleRequest:
    """The sampling request in a body. Raises DataError for what the engine cannot answer."""
    if wanted := [name for name in UNSUPPORTED if body.get(name)]:
        raise DataError(f"{wanted[0]} is not supported by this server; leave it out")
    ids, count = tuple(read_model_input(body["prompt"]).tolist()), int(body.get("num_samples", 1))
    tops = [int(body.get(name) or 0) for name in ("topk_prompt_logprobs", "topk_sample_logprobs")]
    if not ids:
        raise DataError("the prompt is empty; send at least one token")
    if wrong := [i for i in ids if not 0 <= i < limits.vocab_size]:
        raise DataError(f"the prompt has the id {wrong[0]}; ids are below {limits.vocab_size}")
    if not 1 <= count <= MOST_SAMPLES or not all(0 <= top <= MOST_TOP for top in tops):
        raise DataError(f"num_samples={count} or the number of top tokens {tops} is out of range")
    params = replace(read_sampling_params(body["sampling_params"], limits, len(ids)), logprobs=tops[1])
    longest, why = limits.length_limit or (len(ids) + params.max_new_tokens, "")
    if params.max_new_tokens < 1 or len(ids) + params.max_new_tokens > longest:
        text = f"a prompt of {len(ids)} tokens and max_tokens={params.max_new_tokens} do not fit"
        raise DataError(f"{text}: max_tokens is at least 1{why and f', and {why}'}")
    return SampleRequest(request_id, ids, params, count, tops[0] if tops[0] or body.get("prompt_logprobs") else None)


def read_sampling_params(given: Json, limits: ModelLimits, prompt: int) -> SamplingParams:
    """The sampling parameters of a request; without max_tokens as many as the context has room for.

    Raises DataError for values out of range.
    """
    longest = limits.length_limit[0] if limits.length_limit else prompt + 4096
    temperature, top_p = float(given.get("temperature", 1)), float(given.get("top_p", 1))
    top_k, stop, seed, most = given.get("top_k", -1), given.get("stop"), given.get("seed"), given.get("max_tokens")
    if not (math.isfinite(temperature) and temperature >= 0 and 0 < top_p <= 1) or (top_k < 1 and top_k != -1):
        raise DataError(f"temperature={temperature:g}, top_p={top_p:g} or top_k={top_k} is out of range")
    several: Sequence[Any] = [stop] if isinstance(stop, str) else stop or []
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=None if top_k == -1 else int(top_k),
        max_new_tokens=longest - prompt if most is None else int(most),
        stop=tuple(one for one in several if isinstance(one, str) and one),
        stop_token_ids=tuple(int(one) for one in several if not isinstance(one, str)),
        ignore_eos=stop is not None and not several,
        seed=secrets.randbits(63) if seed is None else int(seed) & ((1 << 63) - 1),
    )
