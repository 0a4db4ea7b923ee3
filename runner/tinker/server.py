"""The server in a job's processes: rank 0 listens and leads, the others follow.

    event loop, in a thread of rank 0 ──OperationQueue──▶ leader ──the same operation on all ranks──▶ TrainingService
                                      ◀────futures─────────┘

The thread that has the model computes: an operation, then a few tokens for each sampling request, and so on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from starlette.types import ASGIApp, Receive, Scope, Send

from runner.adapter.config import LoraConfig, SharedBaseConfig
from runner.build.components import build_device, build_model, build_tokenizer
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem, RunnerError
from runner.core.rank_info import RankInfo
from runner.data.readers import read_whole_text
from runner.inference.engine import TokenEvent
from runner.inference.http import HttpLimits, http_url, listen, serve_in_thread
from runner.interfaces import GenerativeModel
from runner.parallelism.parallel_context import ParallelContext
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.tinker.checkpoints import CheckpointPath, ClientStore
from runner.tinker.messages import SampledSequence, SampleResult
from runner.tinker.requests import Futures, Operation, OperationQueue, Result
from runner.tinker.rest_routes import rest_routes
from runner.tinker.routes import make_app
from runner.tinker.sampling_routes import sampling_routes
from runner.tinker.service import PromptScores, RequestFailure, SampleEvent, SampleRequest, TrainingService
from runner.tinker.state import BaseModel, ClientRecords, ServerState
from runner.tinker.training_routes import training_routes

log = logging.getLogger("runner")
TOKENS_AT_ONCE = 16  # steps of the engine between two operations
BEAT_S = 5.0  # the other ranks, which wait in a collective, hear from rank 0 at least as often
HOUSEKEEPING_S = 15.0  # between two looks at what has ended
SWITCH_INTERVAL_S = 1e-4  # the event loop gets the interpreter from the thread that computes
STOP, BEAT = "stop", "beat"


@dataclass(slots=True)
class PendingSample:
    """A sampling request whose answers are not complete. left: answers and scores that are missing."""

    request: SampleRequest
    future: Future[Result]
    left: int
    tokens: list[list[TokenEvent]] = field(default_factory=list)
    scores: PromptScores | None = None

    def result(self) -> SampleResult:
        """What the client is answered."""
        top = bool(self.request.params.logprobs)
        sequences = [
            SampledSequence(
                str(events[-1].finish_reason),
                [event.token_id for event in events],
                [event.logprob for event in events],
                [event.top_logprobs for event in events] if top else None,
            )
            for events in self.tokens
        ]
        if self.scores is None:
            return SampleResult(sequences)
        wanted = [(), *self.scores.top] if self.request.prompt_logprobs else None
        return SampleResult(sequences, [None, *self.scores.logprobs], wanted)


class Leader:
    """Runs operations on all ranks from the thread of rank 0 that has the model."""

    def __init__(self, service: TrainingService, world: ParallelContext, queue: OperationQueue) -> None:
        self._service, self._peers, self._queue = service, world.world_peers, queue
        self._sampling: dict[str, PendingSample] = {}

    def submit(self, request: SampleRequest, source: CheckpointPath | None, key: str | None) -> Future[Result]:
        """Queue a sampling request; the future gets its answers. From any thread."""
        pending = PendingSample(request, Future(), request.count + (request.prompt_logprobs is not None))
        pending.tokens = [[] for _ in range(request.count)]

        def finish(result: None) -> Result:
            self._sampling[request.id] = pending
            return {}

        def fail(future: Future[Result]) -> None:
            if (error := future.exception()) is not None:
                pending.future.set_exception(error)

        operation = Operation("submit", (request, source, key), finish)
        operation.future.add_done_callback(fail)
        self._queue.put(operation)
        return pending.future

    def run(self, is_stopping: Callable[[], bool], beat: Callable[[], None]) -> None:
        """Compute until `is_stopping`; what is then unanswered fails. beat: called every HOUSEKEEPING_S."""
        last = beaten = time.monotonic()
        while not is_stopping():
            operation = self._queue.get(0.0 if self._sampling else min(BEAT_S, 0.2))
            if operation is not None:
                self._run(operation)
            if self._sampling:
                self._deliver(self._everywhere("advance", TOKENS_AT_ONCE if operation is None else 1))
            now = time.monotonic()
            if now - last > BEAT_S:
                last = now
                self._everywhere(BEAT)
            if now - beaten > HOUSEKEEPING_S:
                beaten = now
                beat()
        self._everywhere(STOP)

    def _everywhere(self, verb: str, *arguments: Any) -> Any:
        if self._peers.size > 1:
            self._peers.all_gather((verb, arguments))
        return None if verb in (STOP, BEAT) else getattr(self._service, verb)(*arguments)

    def _run(self, operation: Operation) -> None:
        try:
            result = operation.finish(self._everywhere(operation.verb, *operation.arguments))
        except torch.OutOfMemoryError as error:
            text = "the device's memory is exhausted; send fewer tokens, or end other clients"
            operation.future.set_exception(RunnerError(f"{text}: {str(error).splitlines()[0]}"))
        except RunnerError as error:
            operation.future.set_exception(error)
        except Exception as error:
            log.error("%s failed", operation.verb, exc_info=True)
            operation.future.set_exception(error)
            if self._peers.size > 1:  # the other ranks may have done it, or wait
                raise
        else:
            operation.future.set_result(result)

    def _deliver(self, events: list[SampleEvent]) -> None:
        for event in events:
            id, _, number = event.request_id.partition("#")
            if (pending := self._sampling.get(id)) is None:
                continue
            if isinstance(event, RequestFailure):
                self._everywhere("cancel", id, pending.request.count)
                self._sampling.pop(id).future.set_exception(DataError(event.message))
                continue
            if isinstance(event, PromptScores):
                pending.scores, pending.left = event, pending.left - 1
            else:
                pending.tokens[int(number)].append(event)
                pending.left -= event.finish_reason is not None
            if not pending.left:
                self._sampling.pop(id).future.set_result(pending.result())


def follow(service: TrainingService, world: ParallelContext) -> None:
    """Do what rank 0 does until it stops; what it refuses, all ranks refuse."""
    while True:
        given: list[Any] = world.world_peers.all_gather(None)
        verb, arguments = given[0]
        if verb == STOP:
            return
        if verb != BEAT:
            try:
                getattr(service, verb)(*arguments)
            except RunnerError as error:
                log.info("%s: %s", verb, error)


def read_keys(path: str | None) -> frozenset[str] | None:
    """The keys in a file, one per line; None without a file. Raises EnvironmentProblem."""
    if path is None:
        return None
    try:
        keys = frozenset(read_whole_text(Path(path).expanduser(), "tinker.key_file").split())
    except (OSError, DataError) as error:
        text = f"tinker.key_file={path}: {getattr(error, 'strerror', error)}; set a file with one key per line"
        raise EnvironmentProblem(text) from error
    if not keys or not all(key.startswith("tml-") for key in keys):
        raise EnvironmentProblem(f"tinker.key_file={path}: expected one key per line, each starting with tml-")
    return keys


@dataclass(frozen=True, slots=True)
class BuiltServer:
    """A server's parts on this rank."""

    service: TrainingService
    world: ParallelContext
    model: GenerativeModel
    base: BaseModel
    store: ClientStore
    device: Any

    def describe(self) -> dict[str, Any]:
        """The manifest's record of the device."""
        return {"name": self.device.name, **self.device.describe()}


def build_server(spec: JobSpec, folder: RunFolder, decide: Decisions, place: RankInfo) -> BuiltServer:
    """Load the base, on all ranks. Random weights are written to base/ of the run."""
    device = build_device(spec, decide)
    world: ParallelContext = default_registry().factory(spec.parallelism)(spec.parallelism, device=device, place=place)
    shared = spec.model_copy(update={"adapter": SharedBaseConfig(**spec.adapter.model_dump())})
    model = build_model(shared, build_tokenizer(spec, decide), device, decide, world=world, trains=False)
    name = _base_name(spec, model, folder, place)
    store = ClientStore(folder.root / "clients")
    service = TrainingService(
        model,
        world,
        store,
        decide=decide,
        budget=spec.algorithm.micro_batch_tokens,
        max_num_seqs=spec.sampler.max_concurrent or 1,
        max_samplers=spec.tinker.max_samplers,
        base=name,
    )
    aliases = (spec.model.name,) if model.weights_source.drawn else ()
    about = BaseModel(name, aliases, type(model.inner).__name__, service.limits, cast(LoraConfig, spec.adapter).alpha)
    return BuiltServer(service, world, model, about, store, device)


def _base_name(spec: JobSpec, model: GenerativeModel, folder: RunFolder, place: RankInfo) -> str:
    """The folder or hub id of the base, from which clients load its tokenizer."""
    if not model.weights_source.drawn:
        assert spec.model.source is not None
        return spec.model.source
    base = folder.root / "base"
    if not base.is_dir() or model.whole.is_sharded:
        model.save(base if place.is_rank0 else None)
    return str(base)


def lead(
    spec: JobSpec,
    built: BuiltServer,
    records: ClientRecords,
    say: Callable[[str], None],
    is_stopping: Callable[[], bool],
) -> None:
    """Listen, and answer until `is_stopping`. Raises EnvironmentProblem."""
    config, queue, keys = spec.tinker, OperationQueue(), read_keys(spec.tinker.key_file)
    leader = Leader(built.service, built.world, queue)
    state = ServerState(config, built.base, built.store, queue, records, leader.submit, Futures(config.max_requests))
    app = LoopCalls(make_app([*training_routes(state), *sampling_routes(state), *rest_routes(state)], keys))

    def end_idle() -> None:
        for text in state.end_idle_sessions():
            log.warning("%s", text)

    def beat() -> None:
        for path in built.store.delete_expired():
            log.info("deleted %s, whose time to live has passed", path)
        app.call(end_idle)

    with ExitStack() as ends:
        listener = ends.enter_context(listen(config.host, config.port))
        ends.enter_context(_switch_interval(SWITCH_INTERVAL_S))
        ends.enter_context(serve_in_thread(app, listener, HttpLimits()))
        url = http_url(config.host, listener.getsockname()[1])
        key = "tml-local" if keys is None else f"KEY     # one of {config.key_file}"
        say(f"model    {built.base.name}")
        say(f"ready    export TINKER_BASE_URL={url} TINKER_API_KEY={key}")
        leader.run(is_stopping, beat)


class LoopCalls:
    """An ASGI app, in whose event loop other threads may call functions."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        self._loop = asyncio.get_running_loop()
        await self._app(scope, receive, send)

    def call(self, work: Callable[[], object]) -> None:
        """Let the event loop call `work`; before its first request there is nothing to do."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(work)


@contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
