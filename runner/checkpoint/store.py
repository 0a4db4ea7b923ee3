"""A run's checkpoints: saved at once or in the background, read back, the best one named.

state of every rank ──agreed──▶ what each writes ─┬─ save ──────────────────────────▶ writer
                                                  └─ start: copied ─ in a thread ───▶ writer

A checkpoint in the background is written from a copy in host memory, kept from save to save, one at a time, while
training continues changing the tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from runner.checkpoint import format, save_plan, step_folders
from runner.checkpoint.config import CheckpointConfig
from runner.checkpoint.format import Manifest, TensorPiece
from runner.checkpoint.save_plan import SavePlan
from runner.checkpoint.step_folders import CheckpointWriter, LoadedCheckpoint, folder_name
from runner.core.errors import CheckpointError, OutOfMemory
from runner.distributed.work_partition import SingleProcess, run_on_all
from runner.interfaces import RankCollectives, State

Pieces = Mapping[str, Mapping[str, TensorPiece]]


class HostCopy:
    """Room in the host's memory for all that this rank writes, pinned where it comes from an accelerator."""

    def __init__(self) -> None:
        self._room: dict[tuple[str, str], Tensor] = {}

    def copy_pieces(self, pieces: Pieces) -> Pieces:
        """The same pieces as they are now; the copy before this one is overwritten. Raises OutOfMemory."""
        room: dict[tuple[str, str], Tensor] = {}
        for section, held in pieces.items():
            for name, piece in held.items():
                room[section, name] = self._host_buffer(piece.values, self._room.get((section, name)))
        self._room = room  # what is no longer there is let go
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


def _in_background(work: Callable[[], object]) -> Future[object]:
    """Begin work in a thread that the end of the program does not wait for."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits raises it
            future.set_exception(error)

    Thread(target=run, name="checkpoint writer", daemon=True).start()
    return future


__all__ = ["CheckpointStore", "LoadedCheckpoint"]

REPORT_WAIT_S = 1.0  # a wait from which on it is worth a line


class CheckpointStore:
    """The checkpoints/ folder `root` of one run; `report` receives one line for each unexpected condition.

    beside: files that have to be on the disk, as far as they were written, before a checkpoint is
    """

    def __init__(
        self, config: CheckpointConfig, *, root: Path, report: Callable[[str], None], beside: Sequence[Path] = ()
    ) -> None:
        self._config, self._root, self._report = config, root, report
        self._writer = CheckpointWriter(config, root, report, beside)
        self._host = HostCopy()
        self._pending: tuple[int, Future[object]] | None = None  # the step that is being written, and its end
        self.peers: RankCollectives = SingleProcess()  # who save together
        self.background: RankCollectives = SingleProcess()  # the same, for the thread that writes

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return step_folders.committed_steps(self._root)

    def load(self, step: int | None = None, *, mapped: bool = False) -> LoadedCheckpoint | None:
        """See `step_folders.load`; not collective: each rank verifies what it reads."""
        return step_folders.load(self._root, step, report=self._report, mapped=mapped)

    def best(self) -> int | None:
        """The step that is best by `checkpoint.best` among those there; None where none was measured."""
        described: dict[int, Manifest] = {}
        for step in self.steps():
            try:
                described[step] = format.read_manifest(self._root / folder_name(step))
            except CheckpointError as error:
                self._report(f"checkpoint {folder_name(step)}: {error}; not considered as the best one")
        return step_folders.best_checkpoint(self._config, described)

    def save(self, step: int, state: Mapping[str, State], metrics: Mapping[str, float]) -> Path:
        """Commit the state after `step` and let older checkpoints go; returns the new folder.

        Each rank gives what it has: tensors in pieces, or some names only; see `make_save_plan`. Raises
        TrainingDiverged when a tensor is not finite, RunnerError when ranks contradict each other, CheckpointError when
        this step or a later one is there already, StorageError when the disk is full, read-only or failing: what was
        there before is then untouched.
        """
        self._wait_for(step)
        return self._writer.write(step, self._save_plan(state), metrics, self.peers)

    def start(self, step: int, state: Mapping[str, State], metrics: Mapping[str, float]) -> None:
        """Save in the background; returns when all ranks have copied what they will write.

        Waits for the write before. An error of the write is raised by the next call of any method, or by `check`.
        """
        self._wait_for(step)
        agreed, values = self._save_plan(state), dict(metrics)
        copied: list[SavePlan] = []
        run_on_all(self.peers, lambda: copied.append(replace(agreed, pieces=self._host.copy_pieces(agreed.pieces))))
        work = _in_background(lambda: self._writer.write(step, copied[0], values, self.background))
        self._pending = (step, work)

    def check(self) -> None:
        """Raise, on all ranks at once, what a write in the background met; all call it after each step."""
        if self._pending is not None and all(self.peers.all_gather(self._pending[1].done())):
            self._finish_write()

    def close(self) -> None:
        """Wait for the current write; its errors are printed and not raised."""
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
        """Let the write before the one of `step` end; there is one copy, and one writer."""
        if (flight := self._pending) is None:
            return
        begin = time.monotonic()
        self._finish_write()
        if (waited := time.monotonic() - begin) > REPORT_WAIT_S:
            self._report(f"checkpoint of step {step}: waited {waited:.1f} s for the one of step {flight[0]}")

    def _save_plan(self, state: Mapping[str, State]) -> SavePlan:
        return save_plan.make_save_plan(lambda: format.split_state(state), self.peers)
