"""The routes of the REST client: the server, training runs and their checkpoints, sessions, samplers.

What another key owns is not found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import Route

from runner.tinker.checkpoints import KINDS, CheckpointPath, CheckpointRecord, ClientRecord, expiry
from runner.tinker.requests import Json
from runner.tinker.routes import Handler, json_routes
from runner.tinker.state import ServerState, find_owned

RUN = "training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"


def rest_routes(state: ServerState) -> list[Route]:
    """The routes, over the state."""
    get: dict[str, Handler] = {
        "healthz": lambda state, given, owner: {"status": "ok"},
        "get_server_capabilities": describe_server,
        "training_runs": list_runs,
        RUN: lambda state, given, owner: _run_json(state, state.store.find_client(given["run"], owner)),
        RUN + "/checkpoints": list_checkpoints_of_run,
        "checkpoints": list_checkpoints,
        "sessions": list_sessions,
        "sessions/{id}": describe_session,
        "samplers/{id}": describe_sampler,
    }
    delete, put = {CHECKPOINT: delete_checkpoint}, {CHECKPOINT + "/ttl": set_ttl}
    return json_routes(state, get, "GET") + json_routes(state, delete, "DELETE") + json_routes(state, put, "PUT")


def describe_server(state: ServerState, given: Json, owner: str) -> Json:
    """The names of the base."""
    limit = state.base.limits.length_limit
    about = {"max_context_length": limit and limit[0], "trainable": True, "sampleable": True}
    names = dict.fromkeys((state.base.loadable_name, *state.base.aliases))
    return {"supported_models": [{"model_name": name, **about} for name in names]}


def list_runs(state: ServerState, given: Json, owner: str) -> Json:
    """A page of the key's training clients, those that have ended too."""
    records, cursor = _page(state.store.clients(owner), given)
    return {"training_runs": [_run_json(state, one) for one in records], "cursor": cursor}


def list_checkpoints_of_run(state: ServerState, given: Json, owner: str) -> Json:
    """The checkpoints of a training client."""
    record = state.store.find_client(given["run"], owner)
    found = [_checkpoint_json(*one) for one in state.store.checkpoints(record.model_id)]
    return {"checkpoints": found, "cursor": None}


def list_checkpoints(state: ServerState, given: Json, owner: str) -> Json:
    """A page of the key's checkpoints."""
    records = state.store.clients(owner)
    found, cursor = _page([one for record in records for one in state.store.checkpoints(record.model_id)], given)
    return {"checkpoints": [_checkpoint_json(*one) for one in found], "cursor": cursor}


def _checkpoint(state: ServerState, given: Json, owner: str) -> CheckpointPath:
    record = state.store.find_client(given["run"], owner)
    return CheckpointPath(record.model_id, given["kind"], given["name"])


def delete_checkpoint(state: ServerState, given: Json, owner: str) -> None:
    """Delete a checkpoint."""
    state.store.delete(_checkpoint(state, given, owner))


def set_ttl(state: ServerState, given: Json, owner: str) -> Json:
    """Change when a checkpoint expires."""
    checkpoint = _checkpoint(state, given, owner)
    state.store.set_expiry(checkpoint, expiry(given.get("ttl_seconds")))
    return _checkpoint_json(checkpoint, state.store.record(checkpoint))


def list_sessions(state: ServerState, given: Json, owner: str) -> Json:
    """A page of the key's sessions."""
    return {"sessions": _page([one.id for one in state.sessions.values() if one.owner == owner], given)[0]}


def describe_session(state: ServerState, given: Json, owner: str) -> Json:
    """What a session has."""
    found = find_owned(state.sessions, given["id"], owner, "session")
    about = {"training_run_ids": found.clients, "sampler_ids": found.samplers}
    return {**about, "user_metadata": found.user_metadata}


def describe_sampler(state: ServerState, given: Json, owner: str) -> Json:
    """What a sampling session samples from."""
    found = state.sampler(given["id"], owner)
    path = None if found.source is None else str(found.source)
    return {"sampler_id": found.id, "base_model": state.base.loadable_name, "model_path": path}


def _page(found: Sequence[Any], given: Json) -> tuple[Sequence[Any], Mapping[str, int]]:
    """The part of a list that a request's offset and limit name, and the cursor."""
    offset, limit = (max(int(given.get(name, default)), 0) for name, default in (("offset", 0), ("limit", 20)))
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _run_json(state: ServerState, record: ClientRecord) -> Json:
    newest: dict[str, Any] = {}
    for checkpoint, about in state.store.checkpoints(record.model_id):
        newest.setdefault(checkpoint.kind, _checkpoint_json(checkpoint, about))
    return {
        "training_run_id": record.model_id,
        "base_model": record.base_model,
        "model_owner": record.owner,
        "is_lora": True,
        "lora_rank": record.lora.rank,
        "last_request_time": max([record.created, *(one["time"] for one in newest.values())]),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": record.user_metadata,
    }


def _checkpoint_json(checkpoint: CheckpointPath, record: CheckpointRecord) -> Json:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": record.created,
        "tinker_path": str(checkpoint),
        "expires_at": record.expires,
        "size_bytes": record.size_bytes,
        "user_metadata": record.user_metadata,
    }
