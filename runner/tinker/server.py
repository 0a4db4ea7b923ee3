"""The server in a job's processes: rank 0 serves HTTP and broadcasts requests to the other ranks.

    event loop, in a thread of rank 0 ──queue──▶ leader ──the same operation on all ranks──▶ TrainingService
                                      ◀─futures───┘

The thread that has the model computes: an operation, then a few tokens for each sampling request, and so on.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch

from runner.adapter.config import LoraConfig, SharedBaseConfig
from runner.build.components import build_device, build_model, build_tokenizer
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem, RunnerError, TrainingDiverged
from runner.core.rank_info import RankInfo
from runner.core.signals import StopSignal
from runner.core.subprocess import ChildProcess
from runner.inference.http import HttpLimits, http_url, listen, serve_in_thread
from runner.inference.serve import read_api_keys
from runner.interfaces import Device, GenerativeModel
from runner.parallelism.parallel_context import ParallelContext
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.tinker.checkpoints import ClientStore
from runner.tinker.requests import Futures, Operation, Result
from runner.tinker.rest_routes import rest_routes
from runner.tinker.routes import make_app
from runner.tinker.sampling_routes import sampling_routes
from runner.tinker.service import TrainingService
from runner.tinker.state import BaseModel, ServerState
from runner.tinker.training_routes import training_routes

if TYPE_CHECKING:
    from runner.launch.run_records import TrainingClientRecords

log = logging.getLogger("runner")
TOKENS_AT_ONCE = 16  # steps of the engine between two operations
BEAT_S = 5.0  # the other ranks, which wait in a collective, hear from rank 0 at least as often
POLL_S = 0.2  # between two looks whether to stop
CLIENT_GRACE_S = 10.0  # from SIGTERM to SIGKILL of the client program
CLEAN_UP_S = 15  # between two looks at what has ended
SWITCH_INTERVAL_S = 1e-4  # the event loop gets the interpreter from the thread that computes
STOP, BEAT = "stop", "beat"


class Leader:
    """Runs operations on all ranks from the thread of rank 0 that has the model."""

    def __init__(self, service: TrainingService, world: ParallelContext, queue: SimpleQueue[Operation]) -> None:
        self._service, self._peers, self._queue = service, world.world_peers, queue
        self._sampling: dict[str, Future[Result]] = {}

    def run(self, stop: StopSignal, is_over: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Compute until a signal, or until `is_over`; what is then unanswered fails.

        A signal saves each training client that has made steps since its last state; SIGUSR1 saves and continues.
        """
        beaten = time.monotonic()
        while not is_over():
            stop.agree_across_ranks(lambda own: [own])
            if stop.is_requested or stop.checkpoint_requested:
                self._save_clients(say)
            if stop.is_requested:
                break
            with suppress(Empty):
                self._run(self._queue.get(timeout=0 if self._sampling else POLL_S))
            if self._sampling:
                self._advance()
            if time.monotonic() - beaten > BEAT_S:
                beaten = time.monotonic()
                self._everywhere(BEAT)

        self._everywhere(STOP)

    def _advance(self) -> None:
        """Sample tokens, and answer what is complete; if the device's memory is exhausted, all fail."""
        try:
            found = self._everywhere("advance", TOKENS_AT_ONCE if self._queue.empty() else 1)
        except (torch.OutOfMemoryError, TrainingDiverged) as error:
            if self._peers.size > 1:  # the other ranks wait for this one in the middle of a step
                raise
            self._service.drop_samples()
            failed, self._sampling = self._sampling, {}
            for future in failed.values():
                future.set_exception(_memory_error(error) if isinstance(error, torch.OutOfMemoryError) else error)
            return
        for id, result in found.items():
            future = self._sampling.pop(id)
            if isinstance(result, str):
                future.set_exception(DataError(result))
            else:
                future.set_result(result)

    def _save_clients(self, say: Callable[[str], None]) -> None:
        for target in self._service.signal_checkpoints():
            try:
                self._everywhere("save", target, True, None, None)
                say(f"saved    {target}")
            except RunnerError as error:
                say(f"error    not saved: the newest steps of {target.model_id}: {error}")

    def _everywhere(self, verb: str, *arguments: Any) -> Any:
        if self._peers.size > 1:
            self._peers.all_gather((verb, arguments))
        return None if verb in (STOP, BEAT) else getattr(self._service, verb)(*arguments)

    def _run(self, operation: Operation) -> None:
        future, finish = operation.future, operation.finish
        if future.done():  # it was refused before it came here
            return
        try:
            found = self._everywhere(operation.verb, *operation.arguments)
            if finish is not None:
                future.set_result(finish(found) if callable(finish) else finish)
            else:
                self._sampling[operation.arguments[0].id] = future
        except torch.OutOfMemoryError as error:
            future.set_exception(_memory_error(error))
            if self._peers.size > 1:  # the other ranks wait for this one in the middle of the pass
                raise
        except RunnerError as error:
            future.set_exception(error)
        except Exception as error:
            log.error("%s failed", operation.verb, exc_info=True)
            future.set_exception(error)
            if self._peers.size > 1:  # the other ranks may have done it, or wait
                raise


def _memory_error(error: torch.OutOfMemoryError) -> RunnerError:
    text = "the device's memory is exhausted; send fewer tokens, or end other clients"
    return RunnerError(f"{text}: {str(error).splitlines()[0]}")


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
    keys = frozenset(read_api_keys(Path(path).expanduser(), "tinker.key_file"))
    if not all(key.startswith("tml-") for key in keys):
        raise EnvironmentProblem(f"tinker.key_file {path}: expected one key per line, each starting with tml-")
    return keys


@dataclass(frozen=True, slots=True)
class BuiltServer:
    """A server's parts on this rank."""

    service: TrainingService
    world: ParallelContext
    model: GenerativeModel
    base: BaseModel
    store: ClientStore
    device: Device


def build_server(spec: JobSpec, folder: RunFolder, decide: Decisions, place: RankInfo) -> BuiltServer:
    """Load the base, on all ranks. Random weights are written to base/ of the run."""
    device = build_device(spec, decide)
    world: ParallelContext = default_registry().factory(spec.parallelism)(spec.parallelism, device=device, place=place)
    # with adapters that are attached and removed, compiled layers are not tested
    base = spec.model.model_copy(update={"compile": bool(spec.model.compile)})
    shared = spec.model_copy(update={"adapter": SharedBaseConfig(**spec.adapter.model_dump()), "model": base})
    model = build_model(shared, build_tokenizer(spec, decide), device, decide, world=world, trains=False)
    name = _base_name(spec, model, folder, place)
    store = ClientStore(folder.root / "clients")
    service = TrainingService(spec, model, world, store, decide, name)
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
    spec: JobSpec, built: BuiltServer, records: TrainingClientRecords, say: Callable[[str], None], stop: StopSignal
) -> None:
    """Listen, and answer until a signal, or until tinker.command ends. Raises EnvironmentProblem."""
    config, keys = spec.tinker, read_keys(spec.tinker.key_file)
    queue: SimpleQueue[Operation] = SimpleQueue()
    state = ServerState(config, built.base, built.store, queue, records, Futures(config.max_requests))
    app = make_app([*training_routes(state), *sampling_routes(state), *rest_routes(state)], keys)

    async def clean_up() -> None:
        try:
            for text in state.end_idle_sessions():
                log.warning("%s", text)
            for path in built.store.delete_expired():
                log.info("deleted %s, whose time to live has passed", path)
        except Exception:  # it would end the thread that answers all clients
            log.error("idle sessions and expired checkpoints were not removed", exc_info=True)

    built.store.remove_leftovers()
    with ExitStack() as ends:
        listener = ends.enter_context(listen(config.host, config.port))
        ends.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        ends.enter_context(serve_in_thread(app, listener, HttpLimits(), every=(CLEAN_UP_S, clean_up)))
        url = http_url(config.host, listener.getsockname()[1])
        key = "tml-local" if keys is None else f"KEY     # one of {config.key_file}"
        say(f"model    {built.base.name}")
        say(f"ready    export TINKER_BASE_URL={url} TINKER_API_KEY={key}")
        leader = Leader(built.service, built.world, queue)
        client = None
        if config.command:
            client = start_client(config.command, url, "tml-local" if keys is None else min(keys))
            ends.callback(client.stop, CLIENT_GRACE_S)
        leader.run(stop, lambda: client is not None and not client.is_running(), say)
        if client is not None and client.returncode:
            raise RunnerError(f"tinker.command={shlex.join(config.command)} ended with exit code {client.returncode}")


def start_client(command: Sequence[str], url: str, key: str) -> ChildProcess:
    """Start the client program of the configuration. Raises EnvironmentProblem."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "PATH": path}
    try:
        return ChildProcess(command, end_signal=signal.SIGTERM, env=os.environ | own)
    except OSError as error:
        raise EnvironmentProblem(f"tinker.command: {command[0]} cannot be started: {error.strerror}") from error
