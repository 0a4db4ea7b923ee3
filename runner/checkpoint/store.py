"""A run's checkpoints: saved immediately or in the background, loaded, the best one found.

state of every rank ──save plan──▶ what each writes ─┬─ save ──────────────────────────▶ writer
                                                     └─ start: copied ─ in a thread ───▶ writer

A checkpoint in the background is written from a copy in host memory while training changes the tensors. There is one
copy, whose memory is reused, and one write at a time. With checkpoint.asynchronous=null, the first `start` decides by
the free memory of all machines whether there is a copy; without one, `start` is `save`.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor

from runner.checkpoint import format, save_plan, step_folders
from runner.checkpoint.config import CheckpointConfig
from runner.checkpoint.format import Manifest, TensorPiece
from runner.checkpoint.save_plan import SavePlan
from runner.checkpoint.step_folders import CheckpointWriter, LoadedCheckpoint, folder_name
from runner.core import fsync_io
from runner.core.errors import CheckpointError, OutOfMemory
from runner.core.threads import run_in_daemon_thread
from runner.distributed.work_partition import SingleProcess, run_on_all
from runner.interfaces import RankCollectives, State

Pieces = Mapping[str, Mapping[str, TensorPiece]]


class HostCopy:
    """Host memory for the shards that this rank writes, pinned for those on an accelerator."""

    def __init__(self) -> None:
        self._room: dict[tuple[str, str], Tensor] = {}

    def copy_pieces(self, pieces: Pieces) -> Pieces:
        """A copy of the shards; overwrites the previous copy. Raises OutOfMemory."""
        room: dict[tuple[str, str], Tensor] = {}
        for section, held in pieces.items():
            for name, piece in held.items():
                room[section, name] = self._host_buffer(piece.values, self._room.get((section, name)))
        self._room = room  # frees buffers that are no longer needed
        for section, held in pieces.items():
            for name, piece in held.items():
                room[section, name].copy_(piece.values, non_blocking=True)
        if any(piece.values.device.type != "cpu" for held in pieces.values() for piece in held.values()):
            torch.accelerator.synchronize()
        return {s: {n: replace(one, values=room[s, n]) for n, one in held.items()} for s, held in pieces.items()}

    def _host_buffer(self, values: Tensor, kept: Tensor | None) -> Tensor:
        if kept is not None and (kept.shape, kept.dtype) == (values.shape, values.dtype):
            return kept
        try:
            return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type != "cpu")
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(
                f"not enough host memory for a copy of the checkpoint: {str(error).splitlines()[0]}\n"
                "  type checkpoint.asynchronous=false to write without a copy; training then waits"
            ) from error


__all__ = ["CheckpointStore", "LoadedCheckpoint"]

REPORT_WAIT_S = 1.0  # a longer wait is reported
CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# where the limit, what is used, and cache that can be dropped stand: of cgroup version 2, and of version 1
CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory() -> int:
    """Bytes of free host memory, cache included, within cgroup limits (of a container, a Slurm job)."""
    found = [psutil.virtual_memory().available]
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if (files := CGROUP_FILES.get(controllers)) is None:
            continue
        folder = CGROUP / controllers / name.lstrip("/")
        for each in (folder, *folder.parents[: len(Path(name).parts) - 1]):
            with suppress(OSError, ValueError, KeyError):  # not mounted here, or no limit: max
                limit, used = (int((each / file).read_text()) for file in files[:2])
                counts = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
                found.append(limit - used + int(counts[files[2]]))
    return min(found)


class CheckpointStore:
    """The checkpoints/ folder `root` of one run; report: receives a line for each unexpected condition.

    beside: files to flush to the disk before a checkpoint is committed
    """

    def __init__(
        self, config: CheckpointConfig, *, root: Path, report: Callable[[str], None], beside: Sequence[Path] = ()
    ) -> None:
        self._config, self._root, self._report = config, root, report
        self._writer = CheckpointWriter(config, root, report, beside)
        self._host = HostCopy()
        self._pending: tuple[int, Future[Path]] | None = None  # the step that is being written in the background
        self._asynchronous = config.asynchronous
        self.record_fact: Callable[[str, str, str], object] = lambda *_: None
        self.peers: RankCollectives = SingleProcess()  # the ranks that save together
        self.background: RankCollectives = SingleProcess()  # the same ranks, for the writing thread

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return step_folders.committed_steps(self._root)

    def load(self, step: int | None = None, *, mapped: bool = False) -> LoadedCheckpoint | None:
        """See `step_folders.load`; not collective: each rank verifies what it reads."""
        return step_folders.load(self._root, step, report=self._report, mapped=mapped)

    def best(self) -> int | None:
        """The best existing step by `checkpoint.best`; None if it was not measured."""
        described: dict[int, Manifest] = {}
        for step in self.steps():
            try:
                described[step] = format.read_manifest(self._root / folder_name(step))
            except CheckpointError as error:
                self._report(f"checkpoint {folder_name(step)}: {error}; not considered as the best one")
        return step_folders.best_checkpoint(self._config, described)

    def save(self, step: int, state: Mapping[str, State], metrics: Mapping[str, float]) -> Path:
        """Write the checkpoint of `step` and delete old ones; returns the new folder.

        Each rank passes its own state: shards, or only some names; see `make_save_plan`. Raises TrainingDiverged if a
        tensor is not finite, RunnerError if ranks contradict each other, CheckpointError if this step or a later one
        exists, StorageError if the disk is full, read-only or failing. Earlier checkpoints are then unchanged.
        """
        self._wait_for(step)
        return self._writer.write(step, self._save_plan(state), metrics, self.peers)

    def start(self, step: int, state: Mapping[str, State], metrics: Mapping[str, float]) -> None:
        """Save in the background if the copy fits; returns after all ranks have copied their shards.

        Waits for the previous write. An error of the write is raised by the next call of any method, or by `check`.
        """
        self._wait_for(step)
        agreed, values = self._save_plan(state), dict(metrics)
        if self._asynchronous is None:
            self._asynchronous = self._copies_fit(agreed.pieces)
        if not self._asynchronous:
            self._writer.write(step, agreed, values, self.peers)
            return
        copied: list[SavePlan] = []
        run_on_all(self.peers, lambda: copied.append(replace(agreed, pieces=self._host.copy_pieces(agreed.pieces))))
        write = partial(self._writer.write, step, copied[0], values, self.background)
        self._pending = (step, run_in_daemon_thread(write, "checkpoint writer"))

    def check(self) -> None:
        """Raise the error of a write in the background on all ranks; all call it after each step."""
        if self._pending is not None and all(self.peers.all_gather(self._pending[1].done())):
            self._finish_write()

    def close(self) -> None:
        """Wait for the current write; its errors are reported, not raised."""
        if (flight := self._pending) is not None:
            try:
                self._finish_write()
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                self._report(f"the checkpoint of step {flight[0]} was not written: {reason}")

    def _finish_write(self) -> None:
        flight, self._pending = self._pending, None
        if flight is not None:
            flight[1].result()

    def _wait_for(self, step: int) -> None:
        """Wait for the write before that of `step`: there is one copy and one writer."""
        if (flight := self._pending) is None:
            return
        begin = time.monotonic()
        self._finish_write()
        if (waited := time.monotonic() - begin) > REPORT_WAIT_S:
            self._report(f"checkpoint of step {step}: waited {waited:.1f} s for the one of step {flight[0]}")

    def _copies_fit(self, pieces: Pieces) -> bool:
        """Whether the copies of its ranks fit in half of the free memory of each machine. Collective."""
        own = sum(piece.values.nbytes for held in pieces.values() for piece in held.values())
        ranks, needed = self.peers.all_gather((platform.node(), own, available_memory())), Counter[str]()
        for machine, size, _ in ranks:
            needed[machine] += size
        machine, _, free = max(ranks, key=lambda one: needed[one[0]] / max(one[2], 1))
        fits = needed[machine] <= free / 2
        sizes = fsync_io.format_bytes(needed[machine]), fsync_io.format_bytes(free)
        text = "the copy needs {}, {} of host memory are free; null = true if it fits in half of it".format(*sizes)
        self.record_fact("checkpoint.asynchronous", str(fits).lower(), text)
        return fits

    def _save_plan(self, state: Mapping[str, State]) -> SavePlan:
        return save_plan.make_save_plan(lambda: format.split_state(state), self.peers)
