"""Weights from trainer to sampler, by each route: seconds for a gigabyte, against a plain copy in memory.

handed     the tensors themselves; the sampler copies them into its own
files      written below /dev/shm with a digest; another process maps, digests and copies them
HTTP       the same files, sent to a process that does not see them, over the loopback device
Ray        its object store, without a digest, in place of files (`arms/object_store.py`)
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import measure as harness
import report
import torch
from arms.holding import Holding, named, weights
from torch import Tensor

from parts import plan
from parts.plan import Plan
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.launch.ray.driver_connection import AS_LOCAL, LOOPBACK, QUIET
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.server.job_token import TOKEN
from runner.sampler.server.pool import SamplerPool
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.transports import DeviceCopy, SharedFiles
from runner.weight_sync.weight_store import WeightStore

MEGABYTES, QUICK_MEGABYTES = 1000, 400
WAIT_S = 60.0
PLACES = {"files": "here", "HTTP": "elsewhere"}


def measure(at: Plan) -> dict[str, Any]:
    """Seconds per GB, by route and round."""
    megabytes = QUICK_MEGABYTES if at.quick else MEGABYTES
    torch.set_num_threads(1)
    source, own = weights(megabytes), Holding(megabytes)
    size = sum(tensor.nbytes for tensor in source.values()) / 10**9
    plan.say(f"weights of {size:.2f} GB, {at.rounds} rounds")
    found: list[dict[str, float]] = []
    os.environ[TOKEN] = "benchmark"
    with ExitStack() as during:
        shelf = during.enter_context(_shelf(at.folder / "run", source))
        ends = {name: during.enter_context(_end(at, where, megabytes)) for name, where in PLACES.items()}
        store = during.enter_context(_store(at, megabytes))
        for number in range(-1, at.rounds):  # the first maps everyone's pages, and does not count
            one = _round(source, own, shelf, ends, number + 2) | {"Ray": store()}
            found += [{name: taken / size for name, taken in one.items()}] if number >= 0 else []
    return {"gigabytes": size, "rounds": found}


def _round(
    source: Mapping[str, Tensor], own: Holding, shelf: SharedFiles, ends: Mapping[str, SamplerPool], version: int
) -> dict[str, float]:
    handed = DeviceCopy(lambda: named(source), by_reference=True)
    copies = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    _copied(source, copies)  # so that their pages are there
    seconds = {"copy": _timed(lambda: _copied(source, copies))}
    handed.publish(version)
    seconds["handed"] = _timed(lambda: own.load_weights(handed.get(version), version))
    seconds["written"] = _timed(lambda: shelf.publish(version))
    for name, end in ends.items():
        seconds[name] = _timed(lambda end=end: end.load_weights(shelf.get(version), version))  # type: ignore[misc]
    shelf.drop_below(version + 1)
    return seconds


def _copied(source: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        copies[name].copy_(tensor)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@contextmanager
def _shelf(root: Path, source: Mapping[str, Tensor]) -> Iterator[SharedFiles]:
    root.mkdir()
    shelf = WeightStore(reserve_dir(root, 2 * sum(tensor.nbytes for tensor in source.values())))
    route = SharedFiles(lambda: named(source), None, peers=SINGLE_PROCESS, store=shelf, source=0)
    try:
        yield route
    finally:
        route.close()


@contextmanager
def _end(at: Plan, where: str, megabytes: int) -> Iterator[SamplerPool]:
    """A process that holds weights, and the client that speaks to it."""
    folder = at.folder / where
    folder.mkdir()
    words = (sys.executable, "-m", "arms.holding", "0", str(folder), str(megabytes), where)
    process = subprocess.Popen(words, env=harness.environment(at.threads, at.folder) | {TOKEN: os.environ[TOKEN]})
    config = TorchSamplerConfig(timeout_s=WAIT_S)
    pool = SamplerPool(config, 1, folder, token=os.environ[TOKEN], vocab_size=2)
    try:
        yield pool
    finally:
        pool.close()
        process.kill()
        process.wait()


@contextmanager
def _store(at: Plan, megabytes: int) -> Iterator[Callable[[], float]]:
    """Two processes and Ray's object store between them: seconds of a turn."""
    asked = json.dumps({"folder": str(at.folder / "cluster"), "megabytes": megabytes})
    words = (sys.executable, "-P", "-m", "runner.launch.ray.driver_connection", "arms.object_store", asked)
    known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    surroundings = harness.environment(at.threads, at.folder) | LOOPBACK | AS_LOCAL | QUIET | known
    process = subprocess.Popen(words, env=surroundings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def turn() -> float:
        print(file=process.stdin, flush=True)
        if not (line := process.stdout.readline()):  # type: ignore[union-attr]
            raise harness.ArmFailed("arms.object_store has ended")
        return float(line)

    try:
        yield turn
    finally:
        process.stdin.close()
        process.wait(WAIT_S)


def show(measured: dict[str, Any]) -> str:
    """Seconds for a GB, and how many times a copy's, within rounds."""
    rounds = measured["rounds"]
    rows = []
    for name, parts in {
        "memory copy": ("copy",),
        "handed over, and copied": ("handed",),
        "files: written": ("written",),
        "files: written, and read by another process": ("written", "files"),
        "HTTP: written, and sent to another process": ("written", "HTTP"),
        "Ray's object store: put, and got by another process": ("Ray",),
    }.items():
        taken = [sum(one[part] for part in parts) for one in rounds]
        ratios = [sum(one[part] for part in parts) / one["copy"] for one in rounds]
        rows.append((name, f"{sorted(taken)[len(taken) // 2]:.2f}", plan.shown(ratios)))
    return report.table((f"{measured['gigabytes']:.1f} GB of bfloat16", "s per GB", "of a copy"), rows)


def problems(measured: dict[str, Any]) -> list[str]:
    """Nothing here can be wrong, only slow: what is read is compared by its digest."""
    return []
