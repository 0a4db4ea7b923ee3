"""The checkpoints/ folder: write staged, rename, keep the newest; read the newest valid one.

    .staging-… ─ files, fsync ─ MANIFEST, fsync ─▶ rename ─ fsync ─▶ step-00000100 ─▶ retention
                                                            old ones ─ rename ─▶ .trash-… ─▶ removed

A process that is killed at any time leaves earlier checkpoints unchanged, and at most a folder whose name begins with a
dot, which the next save removes. Each rank writes its shards of the tensors; rank 0, which has the run's lock, does
everything else, and renames the folder when the shards of all ranks are on the disk.

Reading verifies every checksum before a byte is used:

    step-00000300 damaged, reported ──▶ step-00000200 valid ──▶ LoadedCheckpoint
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runner.checkpoint import format
from runner.checkpoint.config import CheckpointConfig, direction
from runner.checkpoint.format import DamagedCheckpoint, FilePart, Manifest
from runner.checkpoint.save_plan import SavePlan
from runner.core import fsync_io, safetensors_layout
from runner.core.errors import CheckpointError, Problem, SpecError, StorageError
from runner.core.fsync_io import failpoint
from runner.distributed.work_partition import run_on_all, run_on_rank0, run_partitioned
from runner.interfaces import RankCollectives, State

STEP_FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A valid checkpoint's step, state (tensors on the CPU) and metrics."""

    step: int
    state: dict[str, State]
    metrics: dict[str, float]


def folder_name(step: int) -> str:
    """step-00000100 for 100."""
    return f"step-{step:08d}"


def committed_steps(root: Path) -> list[int]:
    """The steps with a committed checkpoint, ascending; it may be damaged by now."""
    if not root.is_dir():
        return []
    with fsync_io.storage_errors(f"cannot list {root}"):
        folders = [p.name for p in root.iterdir() if p.is_dir() and not p.is_symlink()]
    numbers = (int(m[1]) for name in folders if (m := STEP_FOLDER.fullmatch(name)))
    return sorted(numbers)


def verify(root: Path, step: int) -> Manifest:
    """The manifest of a step, after verifying all its files.

    Raises DamagedCheckpoint naming file and reason, or CheckpointError if a newer runner wrote it.
    """
    folder = root / folder_name(step)
    described = format.read_manifest(folder)
    if described.step != step:
        raise DamagedCheckpoint(f"{format.MANIFEST_FILE} has step {described.step}, but the folder's name has {step}")
    for name, record in described.files.items():
        _verify_file(folder / name, record)
    return described


def load(root: Path, step: int | None = None, *, report: Report, mapped: bool = False) -> LoadedCheckpoint | None:
    """The newest valid checkpoint, or that of `step`; None if no checkpoint was ever committed.

    mapped: see `format.read_state`. If the newest one is damaged, this is reported and the previous one is used. Raises
    CheckpointError if all checkpoints are damaged, if that of `step` is missing or damaged, and if the newest one needs
    a newer runner.
    """
    present = committed_steps(root)
    if step is not None:
        return _load_exactly(root, step, present, report, mapped)
    damage = []
    for candidate in reversed(present):
        try:
            return _load_one(root, candidate, report, mapped)
        except DamagedCheckpoint as error:
            damage.append(f"{folder_name(candidate)}: {error}")
            report(f"checkpoint {damage[-1]}; trying the previous one")
    if not present:
        return None
    raise CheckpointError(
        f"{root}: all {len(present)} checkpoints are damaged or incomplete:\n  "
        + "\n  ".join(damage)
        + "\n  restore one from a backup, or start a new run"
    )


def _load_exactly(root: Path, step: int, present: list[int], report: Report, mapped: bool) -> LoadedCheckpoint:
    if step not in present:
        have = ", ".join(map(str, present)) or "none"
        raise CheckpointError(f"{root}: no checkpoint of step {step}; there are: {have}")
    try:
        return _load_one(root, step, report, mapped)
    except DamagedCheckpoint as error:
        others = ", ".join(str(n) for n in present if n != step) or "none"
        raise CheckpointError(f"{root / folder_name(step)}: {error}; other steps: {others}") from error


def _load_one(root: Path, step: int, report: Report, mapped: bool) -> LoadedCheckpoint:
    described = verify(root, step)
    folder = root / folder_name(step)
    known = {format.MANIFEST_FILE, *described.files}
    for name in sorted(p.name for p in folder.iterdir() if p.name not in known):
        report(f"checkpoint {folder.name}: ignoring {name}, which its manifest does not list")
    return LoadedCheckpoint(step, format.read_state(folder, described.files, mapped=mapped), dict(described.metrics))


def _verify_file(path: Path, record: format.FileRecord) -> None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            raise DamagedCheckpoint(f"{path.name}: has {size} bytes instead of {record.bytes}")
        if not format.is_intact(path, record):
            raise DamagedCheckpoint(f"{path.name}: its contents do not match their checksum")
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: {fsync_io.error_reason(error)}") from error


LEFTOVER = re.compile(r"\.(staging|trash)-[0-9]{8,}-[0-9a-f]{8}")


class CheckpointWriter:
    """Writes checkpoints under `root`, one at a time, from any thread; see `CheckpointStore`."""

    def __init__(
        self, config: CheckpointConfig, root: Path, report: Callable[[str], None], beside: Sequence[Path]
    ) -> None:
        self._config, self._root, self._report, self._beside = config, root, report, beside
        self._verified: dict[int, Manifest | None] = {}  # None = damaged; each is verified once per process
        self._saved: list[Mapping[str, float]] = []  # metrics of the steps that this process has saved
        self._swept = False

    def write(self, step: int, agreed: SavePlan, metrics: Mapping[str, float], peers: RankCollectives) -> Path:
        """Write the checkpoint that the ranks agreed on and delete old ones. Collective.

        Raises what `CheckpointStore.save` raises.
        """
        run_on_all(peers, lambda: format.refuse_infinite(agreed.pieces))
        staging = run_on_rank0(peers, lambda: self._create_staging(step, agreed))
        try:
            write = partial(self._write_pieces, step, staging, agreed, peers.rank)
            written = run_partitioned(peers, range(peers.size), lambda _: [write()])
            return run_on_rank0(peers, lambda: self._commit(step, staging, agreed, written, metrics))
        finally:
            if peers.rank == 0 and staging.exists():
                shutil.rmtree(staging)

    def _create_staging(self, step: int, agreed: SavePlan) -> Path:
        """Create the staging folder with files of the right sizes, after cleaning up."""
        if not self._root.parent.exists():
            text = "was deleted or moved during the run"
            raise StorageError(f"checkpoint of step {step}: {self._root.parent} {text}; start the run again")
        with self._translate_errors(step, agreed.num_bytes):
            self._root.mkdir(exist_ok=True)
            self._remove_leftovers()
            self._clear_target(step)
            if fsync_io.free_bytes(self._root) < 2 * agreed.num_bytes:  # other writers are unknown
                raise self._storage_error(step, "not enough space", 2 * agreed.num_bytes)
            staging = self._root / f".staging-{step:08d}-{secrets.token_hex(4)}"
            staging.mkdir()
            try:
                failpoint("checkpoint.write")
                fsync_io.write_new(staging / format.VALUES, agreed.values)
                for name, layout in agreed.layouts.items():
                    safetensors_layout.create_file(staging / f"{name}{format.SUFFIX}", layout)
            except BaseException:
                shutil.rmtree(staging)
                raise
            return staging

    def _write_pieces(self, step: int, staging: Path, agreed: SavePlan, rank: int) -> dict[str, FilePart]:
        """Write this rank's shards to the disk; returns what it wrote of each section."""
        if not staging.is_dir():
            text = f"rank {rank} does not see {staging}, which rank 0 created"
            raise StorageError(f"{text}; put the run's folder on storage that all machines share")
        written = {}
        with self._translate_errors(step, agreed.num_bytes):
            for name, held in agreed.pieces.items():
                written[name] = format.write_pieces(staging / f"{name}{format.SUFFIX}", agreed.layouts[name], held)
                failpoint("checkpoint.mid_write")
        return written

    def _commit(
        self,
        step: int,
        staging: Path,
        agreed: SavePlan,
        written: Sequence[Mapping[str, FilePart]],
        metrics: Mapping[str, float],
    ) -> Path:
        """Write the manifest, rename the folder, and delete old checkpoints."""
        target = self._root / folder_name(step)
        with self._translate_errors(step, agreed.num_bytes):
            failpoint("checkpoint.before_manifest")
            manifest = format.build_manifest(step, metrics, agreed.values, agreed.layouts, written)
            fsync_io.write_new(staging / format.MANIFEST_FILE, format.encode_manifest(manifest))
            failpoint("checkpoint.after_manifest")
            fsync_io.fsync_path(staging)
            for path in filter(Path.exists, self._beside):
                fsync_io.fsync_path(path)
            failpoint("checkpoint.before_rename")
            os.rename(staging, target)
            failpoint("checkpoint.after_rename")
            fsync_io.fsync_path(self._root)
            self._verified[step] = manifest
            self._saved.append(metrics)
            refuse_unmeasured(self._config.best, self._saved)
            self._delete_old()
        return target

    @contextmanager
    def _translate_errors(self, step: int, need: int) -> Iterator[None]:
        """Raise StorageError with advice for an OSError."""
        try:
            yield
        except OSError as error:
            raise self._storage_error(step, fsync_io.error_reason(error), need) from error

    def _storage_error(self, step: int, why: str, need: int) -> StorageError:
        free = fsync_io.free_bytes(self._root)
        files = "" if fsync_io.has_free_inodes(self._root) else ", and the disk has no inodes for more files"
        return StorageError(
            f"checkpoint of step {step} in {self._root}: {why}; "
            f"needed {need} bytes ({fsync_io.format_bytes(need)}), free {free} bytes ({fsync_io.format_bytes(free)})"
            f"{files}. Free disk space or fix the disk, then type: run resume {self._root.parent}"
        )

    def _remove_leftovers(self) -> None:
        """Remove folders of a process that ended while saving; only the run's writer may do this."""
        if self._swept:
            return
        for path in sorted(self._root.iterdir()):
            if LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
                self._report(f"checkpoints: removed {path.name}, left by a process that died")
        self._swept = True

    def _clear_target(self, step: int) -> None:
        """Raise CheckpointError if this or a later step has a valid checkpoint; move a damaged one aside."""
        for present in (n for n in committed_steps(self._root) if n >= step):
            if self._verified_manifest(present) is not None:
                says = "exists already" if present == step else f"would be older than that of step {present}"
                raise CheckpointError(
                    f"{self._root}: the checkpoint of step {step} {says}; nothing is overwritten: "
                    f"resume from step {present}, or move {folder_name(present)} away"
                )
        target = self._root / folder_name(step)
        if target.exists():
            aside = self._root / f"damaged-{target.name}-{secrets.token_hex(4)}"
            os.rename(target, aside)
            self._verified.pop(step, None)
            self._report(f"checkpoints: the damaged {target.name} was renamed to {aside.name}; you can delete it")

    def _delete_old(self) -> None:
        """Delete valid checkpoints that are neither among the newest nor the best; damaged ones do not count."""
        whole = {s: m for s in committed_steps(self._root) if (m := self._verified_manifest(s)) is not None}
        kept = steps_to_keep(whole, self._config.keep, best_checkpoint(self._config, whole))
        for step in sorted(whole.keys() - kept):
            trash = self._root / f".trash-{step:08d}-{secrets.token_hex(4)}"
            failpoint("checkpoint.before_trash")
            os.rename(self._root / folder_name(step), trash)
            fsync_io.fsync_path(self._root)
            failpoint("checkpoint.in_trash")
            shutil.rmtree(trash)

    def _verified_manifest(self, step: int) -> Manifest | None:
        if step not in self._verified:
            try:
                self._verified[step] = verify(self._root, step)
            except CheckpointError as error:
                self._report(f"checkpoint {folder_name(step)}: {error}; not removed")
                self._verified[step] = None
        return self._verified[step]


def best_checkpoint(config: CheckpointConfig, described: Mapping[int, Manifest]) -> int | None:
    """The best step by `checkpoint.best`; None if it was not measured."""
    values = {s: m.metrics for s, m in described.items()}
    return None if config.best is None else best_step(values, config.best, config.best_mode)


def best_step(metrics: Mapping[int, Mapping[str, float]], name: str, mode: str | None) -> int | None:
    """The step with the best value of `name`; of equal ones the oldest, None if none has it yet.

    mode: max, min, or None = by its name, else max.
    """
    sign = 1.0 if (mode or direction(name)) != "min" else -1.0
    scores = {s: sign * m[name] for s, m in metrics.items() if not math.isnan(m.get(name, math.nan))}
    return min(scores, key=lambda s: (-scores[s], s), default=None)


def steps_to_keep(steps: Collection[int], keep: int, best: int | None) -> set[int]:
    """The newest `keep` of `steps`, and the best."""
    return set(sorted(steps)[-keep:]) | ({best} if best is not None else set())


def refuse_unmeasured(name: str | None, saved: Sequence[Mapping[str, float]]) -> None:
    """Raise SpecError if evaluations lack their metric `name`.

    saved: metrics of steps of this process alone, as an earlier one may have evaluated something else. An evaluation in
    which rewards failed may lack it.
    """
    evaluated = [values for values in saved if any(key.startswith("eval/") for key in values)]
    scored = [v for v in evaluated if not any(v[key] for key in v if key.endswith("reward/num_failed"))]
    if name is not None and name.startswith("eval/") and scored and not any(name in values for values in saved):
        known = ", ".join(sorted(key for key in scored[-1] if key.startswith(("eval/", "train/", "reward/"))))
        raise SpecError([Problem("checkpoint.best", f"{name} is not measured; this job measures {known}")])
