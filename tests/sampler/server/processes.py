"""Sampler processes of a small model for tests: forked from a process that has torch, and nothing of the test's own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.core.auto_choices import Decisions
from runner.core.errors import Interrupted
from runner.core.signals import StopSignal
from runner.core.subprocess import PR_SET_PDEATHSIG
from runner.inference.rollout_server import serve
from runner.interfaces import Request, Rollout
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.server.protocol import Endpoint, WeightFile, endpoint_path
from runner.sampler.torch import TorchSampler
from tests.model.zoo import causal

TOKEN = "secret of this test"
DEADLINE_S = 300.0  # the start of a process took 70 s on a busy machine
CONFIG = TorchSamplerConfig(temperature=0.8, max_new_tokens=24, max_num_seqs=4)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Options:
    """How a sampler process behaves.

    gate: while this file is there, what is to be drawn waits; each draw is a line in `begun`
    elsewhere: it does not see the files of the trainer, as on another machine
    """

    gate: Path | None = None
    begun: Path | None = None
    port: int = 0
    elsewhere: bool = False


def local(version: int | None = None) -> TorchSampler:
    """The sampler that all processes have; with the weights of `version`, those of a process without.

    Two of them give the same bits for the same requests in one call. Other rows beside a request change its
    log-probabilities by up to 7e-6, and so does another decoder (4e-6), which a model gets where a trial fails: under
    `strict` that is an error with the reason. Threads, matmul precision, oneDNN, deterministic kernels, denormals and
    the alignment of weights change nothing.
    """
    decide = Decisions(strict=True)
    sampler = TorchSampler(CONFIG, model=causal("qwen2", decide), decide=decide)
    if version is not None:
        sampler.load_weights(weights(version), version)
    return sampler


def weights(version: int) -> dict[str, Tensor]:
    """The weights of a version, drawn from its number."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: parameter.detach() + 0.02 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in causal("qwen2").trainable().items()
    }


class Gated:
    """A sampler that notes each draw, and waits while there is a gate."""

    def __init__(self, sampler: TorchSampler, options: Options) -> None:
        self._sampler, self._options = sampler, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        if self._options.begun is not None:
            with self._options.begun.open("a") as file:
                file.write(f"{len(requests)}\n")
        end = time.monotonic() + DEADLINE_S
        while self._options.gate is not None and self._options.gate.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return self._sampler.sample(requests)


@dataclass
class Process:
    """One of them."""

    folder: Path
    index: int
    options: Options = field(default_factory=Options)
    process: Any = None

    def start(self) -> Process:
        self.process = CONTEXT.Process(target=_serve, args=(self.folder, self.index, self.options))
        self.process.start()
        return self

    def again(self, **options: Any) -> Process:
        """A successor, as the launcher starts one."""
        return Process(self.folder, self.index, replace(self.options, **options)).start()

    def endpoint(self) -> Endpoint:
        """Where it listens, once it does."""
        path = endpoint_path(self.folder, self.index)
        until(path.exists)
        return Endpoint.read(path)

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def until(what: Any) -> None:
    """Wait for it."""
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@contextmanager
def samplers(folder: Path, count: int = 1, **options: Any) -> Iterator[list[Process]]:
    """So many processes, and whatever the test puts into the list; all are killed in the end."""
    started = [Process(folder, index, Options(**options)).start() for index in range(count)]
    try:
        yield started
    finally:
        for one in started:
            one.kill()


def _serve(folder: Path, index: int, options: Options) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    if options.elsewhere:
        WeightFile.at = lambda path: WeightFile(path.name, -1, -1)  # type: ignore[method-assign]
    stop = StopSignal()
    stop.install()
    try:
        with stop.interrupt_immediately():
            serve(Gated(local(), options), index, folder, token=TOKEN, port=options.port)
    except Interrupted:
        pass
