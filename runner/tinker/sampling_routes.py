"""The routes that clients sample with: sampler weights, sampling sessions, samples."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.routing import Route

from runner.core.errors import DataError
from runner.inference.engine import SamplingParams
from runner.interfaces import ModelLimits
from runner.tinker.checkpoints import UNNAMED, UNNAMED_S, CheckpointPath, CheckpointRecord, expiry
from runner.tinker.messages import read_model_input
from runner.tinker.requests import Json, Operation
from runner.tinker.routes import json_routes
from runner.tinker.service import SampleRequest
from runner.tinker.state import SamplerHandle, ServerState, inflight_key
from runner.tinker.training_routes import in_order

MAX_SAMPLES = 4096  # of one prompt
MAX_TOP = 1024  # top-k tokens of a position
MAX_NEW_TOKENS = 4096  # of a model without a longest row, where the request does not say how many
UNSUPPORTED = dict.fromkeys(("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"), "leave it out")
UNSUPPORTED["record_stability_info"] = "train with another loss than stable_reinforce, e.g. loss_fn=importance_sampling"


def sampling_routes(state: ServerState) -> list[Route]:
    """The routes, over the state."""
    post = {
        "save_weights_for_sampler": in_order(save_weights_for_sampler),
        "create_sampling_session": create_sampling_session,
        "asample": sample,
    }
    return json_routes(state, post)


def save_weights_for_sampler(state: ServerState, body: Json, owner: str) -> Operation:
    """The operation that saves an adapter to sample with, in a sampling session where it gets no name."""
    model_id, name, metadata = body["model_id"], body.get("path"), body.get("user_metadata")
    target = CheckpointPath(model_id, "sampler_weights", name or f"{UNNAMED}{int(body['seq_id']):06d}")
    done = {"type": "save_weights_for_sampler"}
    if name is not None:
        more = (False, expiry(body.get("ttl_seconds")), metadata)
        return Operation("save", (target, *more), done | {"path": str(target)})
    session, number = state.session(model_id.partition(":")[0], owner), int(body["sampling_session_seq_id"])
    is_inflight = body.get("kind", "snapshot") == "inflight"
    done["sampling_session_id"] = state.add_sampler(session, number, target, model_id if is_inflight else None)
    arguments = (target, False, expiry(UNNAMED_S), metadata)
    if not is_inflight:
        return Operation("save", arguments, done)

    def finish(result: None) -> Json:
        for sampler in list(state.samplers.values()):
            if sampler.follows == model_id:
                sampler.source = target
        return done

    return Operation("publish", (inflight_key(model_id), *arguments), finish)


def create_sampling_session(state: ServerState, body: Json, owner: str) -> Json:
    """Add a sampling session of a checkpoint, or of the base."""
    session, path = state.session(body["session_id"], owner), body.get("model_path")
    if path is None:
        state.base.check_name(body.get("base_model") or "")
    source = None if path is None else state.checkpoint(path, owner)[0]
    sampler = state.add_sampler(session, int(body["sampling_session_seq_id"]), source)
    return {"type": "create_sampling_session", "sampling_session_id": sampler}


def sample(state: ServerState, body: Json, owner: str) -> Json:
    """Sample from a sampling session."""
    sampler = state.sampler(body.get("sampling_session_id") or "", owner)
    request_id, count = f"{sampler.id}:{int(body['seq_id'])}", int(body.get("num_samples", 1))
    started = state.start(request_id, owner, partial(prepare_sample, state, body, request_id, sampler))
    return {**started, "sample_sequence_ids": [f"{request_id}:{number}" for number in range(min(count, MAX_SAMPLES))]}


def prepare_sample(state: ServerState, body: Json, request_id: str, sampler: SamplerHandle) -> Operation:
    """The operation that answers a sampling request."""
    request, source = read_sample_request(request_id, body, state.base.limits), sampler.source
    if source is not None and not sampler.follows:
        sampler.key = sampler_key(source, state.store.record(source))
    return Operation("submit", (request, source, sampler.key))


def sampler_key(source: CheckpointPath, record: CheckpointRecord) -> str:
    """What the engine calls a checkpoint's weights; its path alone may have had others before."""
    return f"{source}#{record.digest}"


def read_sample_request(request_id: str, body: Json, limits: ModelLimits) -> SampleRequest:
    """The sampling request in a body. Raises DataError for values out of range; the engine checks ids."""
    if unsupported := [name for name in UNSUPPORTED if body.get(name)]:
        raise DataError(f"{unsupported[0]} is not supported by this server; {UNSUPPORTED[unsupported[0]]}")
    ids, count = tuple(read_model_input(body["prompt"]).tolist()), int(body.get("num_samples", 1))
    top_prompt, top = (int(body.get(f"topk_{name}_logprobs") or 0) for name in ("prompt", "sample"))
    if not 1 <= count <= MAX_SAMPLES or not (0 <= top_prompt <= MAX_TOP and 0 <= top <= MAX_TOP):
        text = f"num_samples={count}, topk_prompt_logprobs={top_prompt} or topk_sample_logprobs={top}"
        raise DataError(f"{text} is out of range")
    params = read_sampling_params(body["sampling_params"], limits, len(ids), top)
    return SampleRequest(request_id, ids, params, count, top_prompt or (0 if body.get("prompt_logprobs") else None))


def read_sampling_params(given: Json, limits: ModelLimits, prompt: int, logprobs: int) -> SamplingParams:
    """The sampling parameters of a request; without max_tokens as many as the context has room for.

    Raises DataError for values out of range.
    """
    room = limits.length_limit[0] - prompt if limits.length_limit else MAX_NEW_TOKENS
    temperature, top_p = float(given.get("temperature", 1)), float(given.get("top_p", 1))
    top_k, stop, seed, most = given.get("top_k", -1), given.get("stop"), given.get("seed"), given.get("max_tokens")
    if not (math.isfinite(temperature) and temperature >= 0 and 0 < top_p <= 1) or (top_k < 1 and top_k != -1):
        raise DataError(f"temperature={temperature:g}, top_p={top_p:g} or top_k={top_k} is out of range")
    several: Sequence[Any] = [stop] if isinstance(stop, str) else stop or []
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=None if top_k == -1 else int(top_k),
        max_new_tokens=room if most is None else int(most),
        stop=tuple(one for one in several if isinstance(one, str) and one),
        stop_token_ids=tuple(int(one) for one in several if not isinstance(one, str)),
        ignore_eos=stop is not None and not several,
        seed=secrets.randbits(63) if seed is None else int(seed) & ((1 << 63) - 1),
        logprobs=logprobs,
        logprobs_mode="processed",  # as those of the sampled tokens, which importance ratios need
    )
