"""What a trained model leaves for other programs: a Hugging Face folder, or a PEFT adapter beside a base they have."""

from __future__ import annotations

from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from runner.errors import RunnerError
from runner.model.precision import read_as_stored
from runner.quiet import no_progress_bar


def write(module: Any, folder: Path, *, merged: bool, used: bool) -> None:
    """Write a transformers or peft module, which lies whole in this process.

    merged: the adapter in its base; used: the module itself is to stay as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if merged:  # in float32, or little of the adapter would stay
        module = (deepcopy(module) if used else module).float()
        read_as_stored(module)
        module = module.merge_and_unload()
    # or peft would ask the hub whether the embedding was resized
    options = {"save_embedding_layers": False} if hasattr(module, "get_base_model") else {}
    with no_progress_bar():
        module.save_pretrained(folder, **options)


def finish(folder: Path, tokenizer: Any, learnt: int) -> None:
    """Put tokenizer and chat template beside a model that was written. Raises RunnerError if what was written cannot
    hold as many numbers as have learnt, `learnt`."""
    with no_progress_bar():
        tokenizer.save_pretrained(folder)
    found = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    if found < learnt:
        raise RunnerError(
            f"{folder} holds {found} numbers, and {learnt} have learnt: the export is not whole. "
            "The checkpoints are untouched; report this with the model's name"
        )
