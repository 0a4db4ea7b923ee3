"""Reading checkpoints: newest first, every checksum verified before a byte is used.

step-00000300 damaged, reported ──▶ step-00000200 valid ──▶ LoadedCheckpoint
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint import manifest, sections
from runner.checkpoint.manifest import DamagedCheckpoint, Manifest
from runner.core import fsync_io
from runner.core.errors import CheckpointError, StorageError
from runner.interfaces import State

STEP_FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A whole checkpoint's step, state (tensors on the CPU) and the metric values of its step."""

    step: int
    state: dict[str, State]
    metrics: dict[str, float]


def folder_name(step: int) -> str:
    """step-00000100 for 100."""
    return f"step-{step:08d}"


def committed_steps(root: Path) -> list[int]:
    """The steps that were committed under `root`, ascending; whole or, since then, damaged."""
    if not root.is_dir():
        return []
    try:
        folders = [p.name for p in root.iterdir() if p.is_dir() and not p.is_symlink()]
    except OSError as error:
        raise StorageError(f"cannot list {root}: {fsync_io.error_reason(error)}") from error
    numbers = (int(m[1]) for name in folders if (m := STEP_FOLDER.fullmatch(name)))
    return sorted(numbers)


def verify(root: Path, step: int) -> Manifest:
    """The manifest of a step all of whose files are what was written.

    Raises Damaged naming file and reason, or CheckpointError when a newer runner wrote it.
    """
    folder = root / folder_name(step)
    described = manifest.read(folder)
    if described.step != step:
        raise DamagedCheckpoint(f"{manifest.FILE}: it is of step {described.step}, the folder says {step}")
    for name, record in described.files.items():
        _verify_file(folder / name, record)
    return described


def load(root: Path, step: int | None = None, *, report: Report, mapped: bool = False) -> LoadedCheckpoint | None:
    """The newest whole checkpoint, or exactly that of `step`; None where no checkpoint was ever committed.

    mapped: see `sections.read`. A damaged newest one is reported and the one before it is used. Raises CheckpointError
    when there are checkpoints and none is whole, when `step` is not there or not whole, and when the newest one needs a
    newer runner.
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
            report(f"checkpoint {damage[-1]}; trying the one before")
    if not present:
        return None
    raise CheckpointError(
        f"{root}: none of the {len(present)} checkpoints is whole:\n  " + "\n  ".join(damage) + "\n"
        "  restore them from a copy, or start a new run"
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
    known = {manifest.FILE, *described.files}
    for name in sorted(p.name for p in folder.iterdir() if p.name not in known):
        report(f"checkpoint {folder.name}: ignoring {name}, which its manifest does not list")
    return LoadedCheckpoint(step, sections.read_state(folder, described.files, mapped=mapped), dict(described.metrics))


def _verify_file(path: Path, record: manifest.FileRecord) -> None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            raise DamagedCheckpoint(f"{path.name}: has {size} bytes instead of {record.bytes}")
        if fsync_io.sha256(path) != record.sha256:
            raise DamagedCheckpoint(f"{path.name}: its contents do not match their checksum")
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: {fsync_io.error_reason(error)}") from error
