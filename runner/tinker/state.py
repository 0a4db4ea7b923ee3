"""Event-loop state: sessions, training clients, samplers, and the requests that wait.

Everything belongs to a key, by its digest; of another key it is not found. It is in memory alone: after a restart
clients are told so, and continue from checkpoints.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from runner.core.errors import DataError, RunnerError
from runner.interfaces import ModelLimits
from runner.spec.tinker import TinkerConfig
from runner.tinker.checkpoints import CheckpointPath, ClientRecord, ClientStore, LoraSettings, NotFoundError, now_text
from runner.tinker.requests import Futures, GoneError, Json, Operation, Prepare, TrainingClient, prepare_operation

if TYPE_CHECKING:
    from runner.launch.run_records import TrainingClientRecords

RESTARTED = "the server was restarted since, or the session ended; create a new client from its last checkpoint"


def owner_of(key: str) -> str:
    """What a key is called here and on the disk."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(slots=True)
class ClientSession:
    """A client process: its training clients and samplers, and when its last heartbeat came."""

    id: str
    owner: str
    user_metadata: Json | None = None
    last_seen: float = field(default_factory=time.monotonic)
    clients: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SamplerHandle:
    """A sampling session.

    source: None = the base; follows: the training client whose newest weights it has; key: what the engine calls its
    weights, None before they were requested
    """

    id: str
    owner: str
    source: CheckpointPath | None
    follows: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that is served. name: its folder or hub id; alpha: every LoRA is scaled by alpha/rank."""

    name: str
    aliases: tuple[str, ...]
    architecture: str
    limits: ModelLimits
    alpha: float

    @property
    def loadable_name(self) -> str:
        """The name from which the SDK loads a tokenizer: it drops the last part of a name with two slashes."""
        return f"/{self.name}" if self.name.startswith("/") and self.name.count("/") == 2 else self.name

    def check_name(self, name: str) -> None:
        """Raise DataError for another model's name; the last part of a path or hub id is enough."""
        own = {one.lower().rpartition("/")[2] for one in (self.name, *self.aliases)}
        if name.lower().rpartition("/")[2] not in own:
            raise DataError(f"base_model '{name}' is not served here; this server has {self.name}")


Owned = TypeVar("Owned", ClientSession, TrainingClient, SamplerHandle)


def find_owned(
    table: Mapping[str, Owned], id: str, owner: str, kind: str, error: type[RunnerError] = NotFoundError
) -> Owned:
    """What an id names. Raises `error`, also where another key owns it."""
    found = table.get(id)
    if found is None or found.owner != owner:
        raise error(f"no {kind} '{id}': {RESTARTED}")
    return found


@dataclass(slots=True)
class ServerState:
    """The state of the event loop's thread. records: get metrics from the thread that computes."""

    config: TinkerConfig
    base: BaseModel
    store: ClientStore
    queue: SimpleQueue[Operation]
    records: TrainingClientRecords
    futures: Futures
    sessions: dict[str, ClientSession] = field(default_factory=dict)
    clients: dict[str, TrainingClient] = field(default_factory=dict)
    samplers: dict[str, SamplerHandle] = field(default_factory=dict)

    def session(self, id: str, owner: str) -> ClientSession:
        """Raises GoneError, which ends a client's heartbeats."""
        return find_owned(self.sessions, id, owner, "session", GoneError)

    def training_client(self, model_id: str, owner: str) -> TrainingClient:
        """Raises NotFoundError."""
        return find_owned(self.clients, model_id, owner, "training client")

    def sampler(self, id: str, owner: str) -> SamplerHandle:
        """Raises NotFoundError."""
        return find_owned(self.samplers, id, owner, "sampler")

    def checkpoint(self, path: str, owner: str) -> tuple[CheckpointPath, ClientRecord]:
        """A checkpoint that exists, and whose it is. Raises DataError for another form, NotFoundError."""
        found = CheckpointPath.parse(path)
        record = self.store.find_client(found.model_id, owner)
        self.store.record(found)
        return found, record

    # --- what begins and ends ---

    def open_session(self, owner: str, idempotency_key: str | None, user_metadata: Json | None) -> str:
        """The id of a new session, or of the one that the same request has opened before."""
        id = secrets.token_hex(8) if idempotency_key is None else owner_of(f"{owner} {idempotency_key}")
        self.sessions.setdefault(id, ClientSession(id, owner, user_metadata))
        return id

    def end_session(self, session: ClientSession) -> None:
        """Free what a session has on the device; its checkpoints stay."""
        for model_id in session.clients:
            if (client := self.clients.pop(model_id, None)) is not None:
                client.fail_waiting(GoneError(f"the training client {model_id} has ended"))
                self.queue.put(Operation("remove", (model_id,), partial(self._close_records, model_id)))
        ended = {self.samplers.pop(id).key for id in session.samplers}
        if keys := sorted(filter(None, ended - {other.key for other in self.samplers.values()})):
            self.queue.put(Operation("remove_samplers", (keys,), {}))
        del self.sessions[session.id]
        self.futures.drop(f"{session.id}:")

    def end_idle_sessions(self) -> list[str]:
        """End those without a heartbeat, and give up requests that wait for one that never came; says which."""
        now, ended = time.monotonic(), []
        for session in list(self.sessions.values()):
            if now - session.last_seen > self.config.session_timeout_s:
                self.end_session(session)
                ended.append(f"session {session.id} ended: no heartbeat for {self.config.session_timeout_s:g} s")
        gaps = ((id, client.give_up_gap(now)) for id, client in self.clients.items())
        return ended + [f"{id}: {text}" for id, text in gaps if text]

    def create_client(
        self, session: ClientSession, body: Json, lora: LoraSettings, source: CheckpointPath | None = None
    ) -> Operation:
        """The operation that adds a training client, with a fresh LoRA or that of a checkpoint.

        Raises DataError where there are enough of them, and for another optimizer.
        """
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise DataError(f"optimizer '{kind}' is not supported; there is: adamw")
        if len(self.clients) >= self.config.max_tenants:
            text = f"{len(self.clients)} training clients exist (tinker.max_tenants={self.config.max_tenants})"
            raise DataError(f"{text}; end one of them, or start the server with more")
        model_id, metadata = client_id(session, body), body.get("user_metadata")
        record = ClientRecord(model_id, session.owner, self.base.name, lora, now_text(), metadata)
        self.clients[model_id] = TrainingClient(record, self.queue)
        session.clients.append(model_id)

        def finish(result: None) -> Json:
            self.store.add_client(record)
            self.records.open(record)
            if source is None:
                return {"type": "create_model", "model_id": model_id}
            return {"type": "load_weights", "model_id": model_id, "path": str(source)}

        more = () if source is None else (source, bool(body["optimizer"]))
        operation = Operation("create", (model_id, lora, *more), finish)
        operation.future.add_done_callback(lambda done: done.exception() and self.clients.pop(model_id, None))
        return operation

    def _close_records(self, model_id: str, result: None) -> Json:
        self.records.close(model_id)
        return {}

    def add_sampler(
        self, session: ClientSession, number: int, source: CheckpointPath | None, follows: str | None = None
    ) -> str:
        """The id of a new sampling session; nothing is loaded before its first request."""
        id = f"{session.id}:sample:{number}"
        if id not in self.samplers:  # the request may come twice
            key = inflight_key(follows) if follows else None
            self.samplers[id] = SamplerHandle(id, session.owner, source, follows, key)
            session.samplers.append(id)
        return id

    # --- requests ---

    def order(self, model_id: str, seq_id: int | None, owner: str, prepare: Prepare) -> Json:
        """Queue a request of a training client in its order; one that is sent again is the same one.

        Raises NotFoundError, GoneError, TooManyRequestsError.
        """
        client = self.training_client(model_id, owner)
        number = client.next if seq_id is None else int(seq_id)
        if number < client.next and f"{model_id}:{number}" not in self.futures:
            raise GoneError(f"the result of request {number} of {model_id} has expired; send a new request")
        return self.start(f"{model_id}:{number}", owner, prepare, lambda operation: client.put(number, operation))

    def start(
        self, request_id: str, owner: str, prepare: Prepare, put: Callable[[Operation], None] | None = None
    ) -> Json:
        """Begin a request, or find it where it is sent again.

        put: takes the operation of a request that has an order; others are queued at once. Raises TooManyRequestsError.
        """
        if request_id not in self.futures:
            self.futures.check_room(owner)
            operation = prepare_operation(prepare)
            self.futures.add(request_id, owner, operation.future)
            (put or self.queue.put)(operation)
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}


def inflight_key(model_id: str) -> str:
    """What the engine calls the weights that the samplers of a training client share."""
    return f"{model_id}/inflight"


def client_id(session: ClientSession, body: Json) -> str:
    """The id of a training client, which the SDK computes too."""
    return f"{session.id}:train:{int(body['model_seq_id'])}"
