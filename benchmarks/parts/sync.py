"""Weights from trainer to sampler, by each route: seconds for a gigabyte, against a plain copy in memory.

handed     the tensors themselves; the sampler copies them into its own
files      written below /dev/shm with a digest; another process maps, digests and copies them
HTTP       the same files, fetched by a process that takes itself for another machine, over the loopback device
"""

from __future__ import annotations

import os
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
from arms.holding import MEGABYTE, Holding, named, weights
from torch import Tensor

from parts import plan
from parts.plan import Plan
from runner.routes import Copied, Shelving
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.remote.remotes import Remotes
from runner.sampler.remote.secret import TOKEN
from runner.sharing import ALONE
from runner.shelf import Shelf
from runner.shelf_folder import claim

MEGABYTES, QUICK_MEGABYTES = 2000, 400
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
        shelf = during.enter_context(_shelf(at.folder / "run", megabytes))
        ends = {name: during.enter_context(_end(at, where, megabytes)) for name, where in PLACES.items()}
        for number in range(-1, at.rounds):  # the first maps everyone's pages, and does not count
            one = {name: taken / size for name, taken in _round(source, own, shelf, ends, number + 2).items()}
            found += [one] if number >= 0 else []
    return {"gigabytes": size, "rounds": found}


def _round(
    source: Mapping[str, Tensor], own: Holding, shelf: Shelving, ends: Mapping[str, Remotes], version: int
) -> dict[str, float]:
    handed = Copied(lambda: named(source), handed=True)
    copies = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    _copied(source, copies)  # so that their pages are there
    seconds = {"copy": _timed(lambda: _copied(source, copies))}
    handed.publish(version)
    seconds["handed"] = _timed(lambda: own.load(handed.get(version), version))
    seconds["written"] = _timed(lambda: shelf.publish(version))
    for name, end in ends.items():
        seconds[name] = _timed(lambda end=end: end.load(shelf.get(version), version))  # type: ignore[misc]
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
def _shelf(root: Path, megabytes: int) -> Iterator[Shelving]:
    root.mkdir()
    source = weights(megabytes)
    shelf = Shelf(claim(root, 2 * megabytes * MEGABYTE))
    route = Shelving(lambda: named(source), None, peers=ALONE, shelf=shelf, source=0)
    try:
        yield route
    finally:
        route.close()


@contextmanager
def _end(at: Plan, where: str, megabytes: int) -> Iterator[Remotes]:
    """A process that holds weights, and the client that speaks to it."""
    notes = at.folder / where
    notes.mkdir()
    words = (sys.executable, "-m", "arms.holding", "0", str(notes), str(megabytes), where)
    process = subprocess.Popen(words, env=harness.environment(at.threads, at.folder) | {TOKEN: os.environ[TOKEN]})
    config = TorchSamplerConfig(timeout_s=WAIT_S)
    remotes = Remotes(config, 1, notes, token=os.environ[TOKEN], vocabulary=2)
    try:
        yield remotes
    finally:
        remotes.close()
        process.kill()
        process.wait()


def show(measured: dict[str, Any]) -> str:
    """Seconds for a GB, and how many times a copy's, within rounds."""
    rounds = measured["rounds"]
    rows = []
    for name, parts in {
        "memory copy": ("copy",),
        "handed over, and copied": ("handed",),
        "files: written": ("written",),
        "files: written, and read by another process": ("written", "files"),
        "HTTP: written, and fetched by another process": ("written", "HTTP"),
    }.items():
        taken = [sum(one[part] for part in parts) for one in rounds]
        ratios = [sum(one[part] for part in parts) / one["copy"] for one in rounds]
        rows.append((name, f"{sorted(taken)[len(taken) // 2]:.2f}", plan.shown(ratios)))
    return report.table((f"{measured['gigabytes']:.1f} GB of bfloat16", "s per GB", "of a copy"), rows)


def problems(measured: dict[str, Any]) -> list[str]:
    """Nothing here can be wrong, only slow: what is read is compared by its digest."""
    return []
