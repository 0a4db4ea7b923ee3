"""Writes an export with its model card: staged, then renamed, so that it is never incomplete.

model, card ─▶ .export.<hex>/ ─ rename ─▶ export/        an earlier export/ ─ rename ─▶ .replaced-export ─▶ gone
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from safetensors import SafetensorError

from runner.core.errors import StorageError
from runner.core.fsync_io import replace_folder, storage_errors
from runner.model.model_folder import (
    BASE_QUANTIZATION,
    BASE_WEIGHTS,
    MODEL_CARD,
    PROMPT_STYLE,
    adapter_base,
    is_adapter,
    is_hub_id,
)
from runner.run_dir.folder import display_path
from runner.run_dir.manifest import PromptStyle
from runner.spec.evaluation import without_bounds
from runner.spec.job import JobSpec
from runner.tracker.console import interval_text

if TYPE_CHECKING:  # it brings torch, which may be broken
    from runner.interfaces import TrainableModel


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Facts of the model card that are not in the spec.

    values: metrics of the exported step; samples: of its evaluation
    """

    step: int
    values: Mapping[str, float]
    prompt_style: PromptStyle = "chat"
    samples: Sequence[Mapping[str, Any]] = ()


PIPELINE_TAGS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSequenceClassification": "text-classification",
}
CheckFolder = Callable[[Path], object]  # raises for a wrong folder; the text of its result goes into the card


def write_export(
    model: TrainableModel, target: Path, spec: JobSpec, facts: CardFacts, check: CheckFolder | None = None
) -> object:
    """Write `model` and its card as the folder `target`; returns the result of `check`, None without it.

    Raises StorageError if it cannot be written or `target` is not a folder, and what `check` raises; `target` is then
    unchanged.
    """
    from runner.model.auto_class import auto_class_name  # it brings torch

    remedy = "; the checkpoints are complete: free space or fix the disk, then type: run export"
    with staged_folder(target, remedy) as new:
        model.save(new)
        found = check(new) if check is not None else None
        base_weights = model.base_fingerprint.get("weights") if is_adapter(new) else None
        write_card(new, spec, facts, found, base_weights, auto_class_name(model.inner))
    return found


@contextmanager
def staged_folder(target: Path, remedy: str = "; free space or fix the disk") -> Iterator[Path]:
    """A new folder to write an export into, which takes the place of `target` at the end of the block.

    Raises StorageError if it cannot be written or `target` is not a folder; `target` is unchanged after any error.
    """
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with storage_errors(f"cannot write the export {display_path(target)}", remedy, (OSError, SafetensorError)):
        if target.exists() and not target.is_dir():
            raise StorageError(f"{display_path(target)} exists and is not a folder; move it, then export again")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield staging
            _open_to_readers(staging)
            replace_folder(staging, target)
        finally:
            if staging.exists():
                shutil.rmtree(staging)


def _open_to_readers(staging: Path) -> None:
    """Give every file the mode of the user's umask: safetensors writes files that only the owner can read."""
    mode = (staging / MODEL_CARD).stat().st_mode
    for path in staging.iterdir():
        path.chmod(mode)


def write_card(
    export: Path,
    spec: JobSpec,
    facts: CardFacts,
    check: object = None,
    base_weights: str | None = None,
    auto_class: str = "AutoModelForCausalLM",
) -> None:
    """Write README.md into an export: how it was trained and how to load it, without local paths.

    base_weights: the digest of a local base's weights, which an adapter's card records; auto_class: see
    `write_card_text`
    """
    source, data = spec.model.source, spec.data.source
    base = adapter_base(source) if source and is_adapter(source) else source
    head = {
        "tags": [name for name in (spec.algorithm.name, spec.adapter.name) if name != "none"],
        **({"base_model": base} if base and is_hub_id(base) else {}),
        **card_facts(export, facts.prompt_style, base_weights, spec.model.quantization),
    }
    shown = sorted(name for name in without_bounds(facts.values) if name.startswith(("eval/", "train/loss")))
    rows = [
        ("base model", public_name(base) if base else f"{spec.model.name}, from random weights"),
        ("data", ", ".join(map(public_name, [data] if isinstance(data, str) else data))),
        ("algorithm", spec.algorithm.name),
        ("adapter", spec.adapter.name),
        ("step", f"{facts.step} of {spec.steps}"),
        *((name, interval_text(name, facts.values)) for name in shown),
    ]
    parts = ["## Samples", *map(_sample_text, facts.samples)] if facts.samples else []
    if check is not None:
        parts += ["## Check", f"This folder was compared with the run that wrote it: {check}."]
    write_card_text(export, spec.name, auto_class, head, rows, parts)


def card_facts(export: Path, style: PromptStyle, base_weights: str | None, quantization: str | None) -> dict[str, str]:
    """What the head of a card records for later commands: see `model_folder`."""
    of_adapter = {BASE_WEIGHTS: base_weights, BASE_QUANTIZATION: quantization} if is_adapter(export) else {}
    known = {**of_adapter, PROMPT_STYLE: style if style == "text" else None}
    return {name: value for name, value in known.items() if value}


def write_card_text(
    export: Path,
    title: str,
    auto_class: str,
    head: Mapping[str, object],
    rows: Sequence[tuple[str, str]],
    parts: Sequence[str] = (),
) -> None:
    """Write README.md: its head, a table of facts, how to load the folder, and more parts.

    auto_class: of transformers, which loads the model, or the base of an adapter
    """
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    own = {"library_name": "peft" if is_adapter(export) else "transformers", "pipeline_tag": PIPELINE_TAGS[auto_class]}
    front = yaml.safe_dump({**own, **head}, sort_keys=False)
    shown = [
        f"# {title}",
        f"| | |\n| --- | --- |\n{table}",
        "## How to load it",
        _loading_code(export, auto_class),
        *parts,
    ]
    text = f"---\n{front}---\n\n" + "\n\n".join(shown) + "\n"
    (export / MODEL_CARD).write_text(text, encoding="utf-8")


def public_name(source: str) -> str:
    """The public name of a source: only the file name of a local folder or file."""
    return source if not Path(source).is_absolute() and not Path(source).exists() else f"{Path(source).name} (local)"


def _loading_code(export: Path, auto_class: str) -> str:
    """Python code that loads the exported folder."""
    ends = is_adapter(export) and (export / "generation_config.json").is_file()
    lines = [
        f"from transformers import {auto_class}, AutoTokenizer{', GenerationConfig' if ends else ''}",
        "",
        'folder = "."  # this folder, or its id on the hub',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
    ]
    if is_adapter(export):
        options = ", num_labels=1" if auto_class == "AutoModelForSequenceClassification" else ""
        lines = [
            "from peft import PeftConfig, PeftModel",
            *lines,
            "config = PeftConfig.from_pretrained(folder)  # which names the base",
            f"base = {auto_class}.from_pretrained(",
            f"    config.base_model_name_or_path, revision=config.revision{options}",
            ")",
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    else:
        lines.append(f"model = {auto_class}.from_pretrained(folder)")
    if ends:
        lines.append("model.generation_config = GenerationConfig.from_pretrained(folder)  # the end tokens")
    return "```python\n" + "\n".join(lines) + "\n```"


def _sample_text(row: Mapping[str, Any]) -> str:
    text = f"{str(row.get('prompt', '')).strip()}\n→ {str(row.get('answer', '')).strip()}"
    return "\n".join(f"    {line}" for line in text.splitlines())  # indented, because it may have a code fence
