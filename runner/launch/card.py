"""The model card of an export: what it was made from, how, and with which numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from runner.spec.job import JobSpec


def write_card(export: Path, spec: JobSpec, step: int, values: Mapping[str, float]) -> None:
    """Write README.md into an export; `values` are the metrics of the exported step."""
    base = getattr(spec.model, "path", None)
    head = {
        "library_name": "transformers" if spec.adapter.name == "none" else "peft",
        "pipeline_tag": "text-generation",
        "tags": [spec.algorithm.name, spec.adapter.name],
        **({"base_model": base} if base else {}),
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
    (export / "README.md").write_text(text, encoding="utf-8")
