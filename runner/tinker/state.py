"""What the event loop knows: sessions, training clients, samplers, and the requests that wait.

Everything belongs to a key, by its digest; of another key it is not found. It is in memory alone: after a restart
clients are told so, and continue from checkpoints.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from runner.core.errors import DataError
from runner.interfaces import ModelLimits
from runner.spec.tinker import TinkerConfig
from runner.tinker.checkpoints import CheckpointPath, ClientRecord, ClientStore, LoraSettings, NotFoundError, now_text
from runner.tinker.requests import Futures, GoneError, Operation, OperationQueue, RequestOrder, Result
from runner.tinker.service import SampleRequest

Json = Mapping[str, Any]
RESTARTED = "the server was restarted since, or the session ended; create a new client from its last checkpoint"


def owner_of(key: str) -> str:
    """What a key is called here and on the disk."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


class ClientRecords(Protocol):
    """Where the metrics of training clients go, from the thread that computes: given by whoever launches."""

    def open(self, record: ClientRecord) -> None: ...

    def add_pass(self, model_id: str, metrics: Mapping[str, float]) -> None: ...

    def log_step(self, model_id: str, metrics: Mapping[str, float]) -> None: ...

    def close(self, model_id: str) -> object: ...


@dataclass(slots=True)
class ClientSession:
    """A client process: its training clients and samplers, and when its last heartbeat came."""

    id: str
    owner: str
    user_metadata: Json | None = None
    seen: float = field(default_factory=time.monotonic)
    clients: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class TrainingClient:
    """A training client. inflight: the newest checkpoint of the samplers that follow it."""

    record: ClientRecord
    order: RequestOrder
    inflight: CheckpointPath | None = None


@dataclass(frozen=True, slots=True)
class SamplerHandle:
    """A sampling session. source: None = the base; follows: the training client that it follows."""

    id: str
    owner: str
    source: CheckpointPath | None
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that is served. name: its folder or hub id; alpha: every LoRA is scaled by alpha/rank."""

    name: str
    aliases: tuple[str, ...]
    architecture: str
    limits: ModelLimits
    alpha: float

    def check_name(self, name: str) -> None:
        """Raise DataError for another model's name; the last part of a path or hub id is enough."""
        own = {one.lower().rpartition("/")[2] for one in (self.name, *self.aliases)}
        if name.lower().rpartition("/")[2] not in own:
            raise DataError(f"base_model '{name}' is not served here; this server has {self.name}")


Prepare = Callable[[], Operation | Future[Result]]  # raises DataError, GoneError
Submit = Callable[[SampleRequest, CheckpointPath | None, str | None], Future[Result]]


@dataclass(slots=True)
class ServerState:
    """The state of the event loop's thread. submit: starts a sampling request."""

    config: TinkerConfig
    base: BaseModel
    store: ClientStore
    queue: OperationQueue
    records: ClientRecords
    submit: Submit
    futures: Futures
    sessions: dict[str, ClientSession] = field(default_factory=dict)
    clients: dict[str, TrainingClient] = field(default_factory=dict)
    samplers: dict[str, SamplerHandle] = field(default_factory=dict)
    created: dict[tuple[str, str], str] = field(default_factory=dict)  # owner and idempotency key → session

    # --- what a key owns ---

    def session(self, id: str, owner: str) -> ClientSession:
        """Raises GoneError, which ends a client's heartbeats."""
        found = self.sessions.get(id)
        if found is None or found.owner != owner:
            raise GoneError(f"no session '{id}': {RESTARTED}")
        return found

    def find_client(self, model_id: str, owner: str) -> TrainingClient:
        """Raises NotFoundError."""
        found = self.clients.get(model_id)
        if found is None or found.record.owner != owner:
            raise NotFoundError(f"no training client '{model_id}': {RESTARTED}")
        return found

    def sampler(self, id: str, owner: str) -> SamplerHandle:
        """Raises NotFoundError."""
        found = self.samplers.get(id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"no sampler '{id}': {RESTARTED}")
        return found

    def checkpoint(self, path: str, owner: str) -> CheckpointPath:
        """Raises DataError for another form, NotFoundError."""
        found = CheckpointPath.parse(path)
        self.store.find_client(found.model_id, owner)
        self.store.record(found)
        return found

    # --- what begins and ends ---

    def open_session(self, owner: str, idempotency_key: str | None, user_metadata: Json | None) -> str:
        """The id of a new session, or of the one that the same request has opened before."""
        key = (owner, idempotency_key or secrets.token_hex(8))
        if key not in self.created:
            id = self.created[key] = secrets.token_hex(8)
            self.sessions[id] = ClientSession(id, owner, user_metadata)
        return self.created[key]

    def end_session(self, session: ClientSession) -> None:
        """Free what a session has on the device; its checkpoints stay."""
        for model_id in session.clients:
            if model_id in self.clients:
                self.end_client(model_id)
        for sampler in session.samplers:
            self.samplers.pop(sampler, None)
        self.sessions.pop(session.id, None)
        self.created = {key: id for key, id in self.created.items() if id != session.id}
        self.futures.drop(f"{session.id}:")

    def end_idle_sessions(self) -> list[str]:
        """End those without a heartbeat, and give up requests that wait for one that never came; says which."""
        now, said = time.monotonic(), []
        for session in list(self.sessions.values()):
            if now - session.seen > self.config.session_timeout_s:
                self.end_session(session)
                said.append(f"session {session.id} ended: no heartbeat for {self.config.session_timeout_s:g} s")
        gaps = ((id, client.order.give_up_gap(now)) for id, client in self.clients.items())
        return said + [f"{id}: {text}" for id, text in gaps if text]

    def create_client(
        self,
        session: ClientSession,
        model_id: str,
        lora: LoraSettings,
        body: Json,
        verb: str,
        more: tuple[Any, ...] = (),
    ) -> Future[Result]:
        """Start the operation that adds a training client. Raises DataError where there are enough of them.

        verb, more: of the service, and its arguments after the id and the LoRA
        """
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise DataError(f"optimizer '{kind}' is not supported; there is: adamw")
        if len(self.clients) >= self.config.max_tenants:
            text = f"{len(self.clients)} training clients exist (tinker.max_tenants={self.config.max_tenants})"
            raise DataError(f"{text}; end one of them, or start the server with more")
        record = ClientRecord(model_id, session.owner, self.base.name, lora, now_text(), body.get("user_metadata"))
        self.clients[model_id] = TrainingClient(record, RequestOrder(self.queue))
        session.clients.append(model_id)

        def finish(result: Any) -> Json:
            self.store.add_client(record)
            self.records.open(record)
            path = {"path": str(more[0])} if more else {}
            return {"type": "load_weights" if more else "create_model", "model_id": model_id, **path}

        def forget_if_failed(future: Future[Result]) -> None:
            if future.exception() is not None:
                self.clients.pop(model_id, None)

        operation = Operation(verb, (model_id, lora, *more), finish)
        operation.future.add_done_callback(forget_if_failed)
        self.queue.put(operation)
        return operation.future

    def end_client(self, model_id: str) -> Future[Result]:
        """Start the operation that frees a training client; what it still waits for fails."""
        self.clients.pop(model_id).order.close(f"the training client {model_id} has ended")

        def finish(result: Any) -> Json:
            self.records.close(model_id)
            return {"type": "unload_model", "model_id": model_id}

        operation = Operation("remove", (model_id,), finish)
        self.queue.put(operation)
        return operation.future

    def add_sampler(
        self, session: ClientSession, number: int, source: CheckpointPath | None, follows: str | None = None
    ) -> SamplerHandle:
        """Register a sampling session; nothing is loaded before its first request."""
        sampler = SamplerHandle(f"{session.id}:sample:{number}", session.owner, source, follows)
        self.samplers[sampler.id] = sampler
        session.samplers.append(sampler.id)
        return sampler

    # --- requests ---

    def order(self, model_id: str, seq_id: int | None, owner: str, prepare: Prepare) -> Json:
        """Queue a request of a training client in its order; one that is sent again is the same one.

        Raises NotFoundError, GoneError, TooManyRequestsError.
        """
        order = self.find_client(model_id, owner).order
        seq_id = order.next if seq_id is None else int(seq_id)
        request_id = f"{model_id}:{seq_id}"
        if request_id not in self.futures:
            if seq_id < order.next:
                raise GoneError(f"request {seq_id} of {model_id} was answered, and its result is no longer kept")
            self.futures.admit(owner)
            operation, future = _prepare(prepare)
            self.futures.add(request_id, owner, future)
            order.put(seq_id, operation)
        return {"request_id": request_id, "model_id": model_id}

    def start(self, request_id: str, owner: str, prepare: Prepare) -> Json:
        """Begin a request that has no order; one that is sent again is the same one."""
        if request_id not in self.futures:
            self.futures.admit(owner)
            self.futures.add(request_id, owner, _prepare(prepare)[1])
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}


def _prepare(prepare: Prepare) -> tuple[Operation | None, Future[Result]]:
    """What is left to be put in order, and the future, which has failed where the request is wrong."""
    try:
        found = prepare()
        return (found, found.future) if isinstance(found, Operation) else (None, found)
    except (KeyError, TypeError, ValueError) as error:
        failed: Exception = DataError(f"the request is malformed: {type(error).__name__}: {error}")
    except (DataError, GoneError) as error:
        failed = error
    future: Future[Result] = Future()
    future.set_exception(failed)
    return None, future
