"""Writes an export with its model card: first aside, then renamed, so that a reader never sees a part.

model, card ─▶ .export.<hex>/ ─ rename ─▶ export/        an earlier export/ ─ rename ─▶ .export.<hex>.old ─▶ gone
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from safetensors import SafetensorError

from runner.core.errors import StorageError
from runner.core.fsync_io import error_reason
from runner.run_dir.folder import display_path
from runner.spec.job import JobSpec

if TYPE_CHECKING:  # it brings torch, which may be broken
    from runner.interfaces import TrainableModel

MODEL_CARD = "README.md"


def write_export(model: TrainableModel, target: Path, spec: JobSpec, step: int, values: Mapping[str, float]) -> None:
    """Write `model` and its card, with the metrics `values` of `step`, as the folder `target`.

    Raises StorageError, with `target` as it was, where the disk refuses or something else than a folder is there.
    """
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with _translate_errors(target):
        if target.exists() and not target.is_dir():
            raise StorageError(f"{display_path(target)} is in the way: it is no folder; move it, then export again")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            model.save(staging)
            write_card(staging, spec, step, values)
            _open_to_readers(staging)
            _replace_target(staging, target)
        finally:
            if staging.exists():
                shutil.rmtree(staging)


def _open_to_readers(staging: Path) -> None:
    """Give every file the mode of the user's umask: safetensors are written for their owner alone."""
    mode = (staging / MODEL_CARD).stat().st_mode
    for path in staging.iterdir():
        path.chmod(mode)


def _replace_target(staging: Path, target: Path) -> None:
    old = staging.with_name(f"{staging.name}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(staging, target)
    if old.exists():
        shutil.rmtree(old)


@contextmanager
def _translate_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write the export {display_path(target)}: {error_reason(error)}; the checkpoints are "
            "whole: make space or "
            "fix the disk, then: run export"
        ) from error


def write_card(export: Path, spec: JobSpec, step: int, values: Mapping[str, float]) -> None:
    """Write README.md into an export; `values` are the metrics of the exported step."""
    base = spec.model.source
    head = {
        "library_name": "peft" if (export / "adapter_config.json").is_file() else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [name for name in (spec.algorithm.name, spec.adapter.name) if name != "none"],
        **({"base_model": base} if base and not Path(base).is_absolute() else {}),  # a hub id: others can follow it
    }
    rows = [
        ("base model", base or f"{spec.model.name}, from random weights"),
        ("data", spec.data.source),
        ("algorithm", spec.algorithm.name),
        ("adapter", spec.adapter.name),
        ("step", f"{step} of {spec.steps}"),
        *((name, f"{value:.4g}") for name, value in sorted(values.items()) if name.startswith(("eval/", "train/loss"))),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    front = yaml.safe_dump(head, sort_keys=False)
    text = f"---\n{front}---\n\n# {spec.name}\n\n| | |\n| --- | --- |\n{table}\n"
    (export / MODEL_CARD).write_text(text, encoding="utf-8")
