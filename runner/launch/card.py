"""The model card of an export: what it was made from, how, and with which numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from runner.spec.job import JobSpec

CARD = "README.md"


def write_card(export: Path, spec: JobSpec, step: int, values: Mapping[str, float]) -> None:
    """Write README.md into an export; `values` are the metrics of the exported step."""
    base = getattr(spec.model, "path", None)
    head = {
        "library_name": "peft" if (export / "adapter_config.json").is_file() else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [name for name in (spec.algorithm.name, spec.adapter.name) if name != "none"],
        **({"base_model": base} if base and not Path(base).is_absolute() else {}),  # a hub id: others can follow it
    }
    rows = [
        ("base model", base or f"{spec.model.name}, from random weights"),
        ("data", getattr(spec.data, "path", spec.data.name)),
        ("algorithm", spec.algorithm.name),
        ("adapter", spec.adapter.name),
        ("step", f"{step} of {spec.steps}"),
        *((name, f"{value:.4g}") for name, value in sorted(values.items()) if name.startswith(("eval/", "train/loss"))),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    front = yaml.safe_dump(head, sort_keys=False)
    text = f"---\n{front}---\n\n# {spec.name}\n\n| | |\n| --- | --- |\n{table}\n"
    (export / CARD).write_text(text, encoding="utf-8")
