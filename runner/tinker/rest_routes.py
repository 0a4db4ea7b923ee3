"""The routes of the REST client: training runs and their checkpoints, sessions, samplers.

What another key owns is not found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runner.core.errors import DataError
from runner.tinker.checkpoints import (
    KINDS,
    CheckpointPath,
    CheckpointRecord,
    ClientRecord,
    NotFoundError,
    check_ttl,
)
from runner.tinker.routes import PREFIX, read_json
from runner.tinker.state import ServerState

RUN = PREFIX + "training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"


def rest_routes(state: ServerState) -> list[Route]:
    """The routes, over the state."""

    async def training_runs(request: Request) -> Response:
        records = state.store.clients(request.scope["owner"])
        shown, cursor = _page(records, request)
        return JSONResponse({"training_runs": [_run_json(state, one) for one in shown], "cursor": cursor})

    async def training_run(request: Request) -> Response:
        return JSONResponse(
            _run_json(state, state.store.find_client(request.path_params["run"], request.scope["owner"]))
        )

    async def checkpoints_of_run(request: Request) -> Response:
        record = state.store.find_client(request.path_params["run"], request.scope["owner"])
        found = [_checkpoint_json(*one) for one in state.store.checkpoints(record.model_id)]
        return JSONResponse({"checkpoints": found, "cursor": None})

    async def checkpoints(request: Request) -> Response:
        records = state.store.clients(request.scope["owner"])
        found = [one for record in records for one in state.store.checkpoints(record.model_id)]
        shown, cursor = _page(found, request)
        return JSONResponse({"checkpoints": [_checkpoint_json(*one) for one in shown], "cursor": cursor})

    def checkpoint_of(request: Request) -> CheckpointPath:
        given = request.path_params
        record = state.store.find_client(given["run"], request.scope["owner"])
        return CheckpointPath.parse(str(CheckpointPath(record.model_id, given["kind"], given["name"])))

    async def delete(request: Request) -> Response:
        state.store.delete(checkpoint_of(request))
        return Response(status_code=204)

    async def set_ttl(request: Request) -> Response:
        checkpoint, body = checkpoint_of(request), await read_json(request)
        state.store.set_expiry(checkpoint, check_ttl(body.get("ttl_seconds")))
        return JSONResponse(_checkpoint_json(checkpoint, state.store.record(checkpoint)))

    return [
        Route(PREFIX + "training_runs", training_runs),
        Route(RUN, training_run),
        Route(RUN + "/checkpoints", checkpoints_of_run),
        Route(PREFIX + "checkpoints", checkpoints),
        Route(CHECKPOINT, delete, methods=["DELETE"]),
        Route(CHECKPOINT + "/ttl", set_ttl, methods=["PUT"]),
        *_session_routes(state),
    ]


def _session_routes(state: ServerState) -> list[Route]:
    async def sessions(request: Request) -> Response:
        own = [id for id, session in state.sessions.items() if session.owner == request.scope["owner"]]
        return JSONResponse({"sessions": _page(own, request)[0]})

    async def session(request: Request) -> Response:
        found = state.sessions.get(request.path_params["id"])
        if found is None or found.owner != request.scope["owner"]:
            raise NotFoundError(f"no session '{request.path_params['id']}'")
        about = {"training_run_ids": found.clients, "sampler_ids": found.samplers}
        return JSONResponse({**about, "user_metadata": found.user_metadata})

    async def sampler(request: Request) -> Response:
        found = state.sampler(request.path_params["id"], request.scope["owner"])
        path = None if found.source is None else str(found.source)
        return JSONResponse({"sampler_id": found.id, "base_model": state.base.name, "model_path": path})

    return [
        Route(PREFIX + "sessions", sessions),
        Route(PREFIX + "sessions/{id}", session),
        Route(PREFIX + "samplers/{id}", sampler),
    ]


def _page(found: Sequence[Any], request: Request) -> tuple[Sequence[Any], Mapping[str, int]]:
    """The part of a list that the request's offset and limit name, and the cursor."""
    try:
        offset, limit = (
            int(request.query_params.get(name, default)) for name, default in (("offset", 0), ("limit", 20))
        )
    except ValueError as error:
        raise DataError(f"offset and limit must be numbers: {error}") from error
    offset, limit = max(offset, 0), max(limit, 0)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _run_json(state: ServerState, record: ClientRecord) -> dict[str, Any]:
    newest: dict[str, Any] = dict.fromkeys(KINDS.values())
    for checkpoint, about in state.store.checkpoints(record.model_id):
        kind = KINDS[checkpoint.kind]
        newest[kind] = newest[kind] or _checkpoint_json(checkpoint, about)
    times = [one["time"] for one in newest.values() if one]
    return {
        "training_run_id": record.model_id,
        "base_model": record.base_model,
        "model_owner": record.owner,
        "is_lora": True,
        "lora_rank": record.lora.rank,
        "last_request_time": max([record.created, *times]),
        "last_checkpoint": newest["training"],
        "last_sampler_checkpoint": newest["sampler"],
        "user_metadata": record.user_metadata,
    }


def _checkpoint_json(checkpoint: CheckpointPath, record: CheckpointRecord) -> dict[str, Any]:
    own = asdict(record)
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": record.created,
        "tinker_path": str(checkpoint),
        "expires_at": record.expires,
        **{name: own[name] for name in ("size_bytes", "user_metadata")},
    }
