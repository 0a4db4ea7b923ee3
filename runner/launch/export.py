"""Writes an export: aside first, then renamed, so that what stands under its name is whole, the old one or the new.

model, card ─▶ .export.<hex>/ ─ rename ─▶ export/        an earlier export/ ─ rename ─▶ .export.<hex>.old ─▶ gone
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from runner.durable import reason
from runner.errors import StorageError
from runner.folder import shown
from runner.launch.card import CARD, write_card
from runner.spec.job import JobSpec


def write_export(model: Any, target: Path, spec: JobSpec, step: int, values: Mapping[str, float]) -> None:
    """Write `model` and its card, with the metrics `values` of `step`, as the folder `target`.

    Raises StorageError, with `target` as it was, where the disk refuses or something else than a folder is there.
    """
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with _worded(target):
        if target.exists() and not target.is_dir():
            raise StorageError(f"{shown(target)} is in the way: it is no folder; move it, then export again")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            model.save(staging)
            write_card(staging, spec, step, values)
            _open_to_readers(staging)
            _put_in_place(staging, target)
        finally:
            if staging.exists():
                shutil.rmtree(staging)


def _open_to_readers(staging: Path) -> None:
    """Give every file the mode that the user's umask gives the card: safetensors are written for their owner alone."""
    mode = (staging / CARD).stat().st_mode
    for path in staging.iterdir():
        path.chmod(mode)


def _put_in_place(staging: Path, target: Path) -> None:
    old = staging.with_name(f"{staging.name}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(staging, target)
    if old.exists():
        shutil.rmtree(old)


@contextmanager
def _worded(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write the export {shown(target)}: {reason(error)}; the checkpoints are whole: make space or "
            "mend the disk, then: run export"
        ) from error
