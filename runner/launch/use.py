"""Uses what a run made: answers prompts from a checkpoint, or exports one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from runner import build
from runner.checkpoint.reader import Loaded
from runner.decisions import Decisions
from runner.errors import CheckpointError, EnvironmentProblem
from runner.folder import RunFolder, shown
from runner.launch.card import write_card
from runner.learner import load_parameters
from runner.spec.job import JobSpec

log = logging.getLogger("runner")


def load_model(folder: RunFolder, spec: JobSpec, checkpoint: int | Literal["best"] | None) -> tuple[Any, Loaded]:
    """A run's model at a checkpoint (a step, "best", or the newest), in evaluation mode, and that checkpoint.

    Raises CheckpointError if there is none.
    """
    decide = Decisions(spec.strict)
    store = build.build_store(spec, folder)
    step = checkpoint if isinstance(checkpoint, int) else None
    if checkpoint == "best" and (step := store.best()) is None:
        raise CheckpointError(
            f"{shown(folder.root)}: no best checkpoint; checkpoint.best names no metric that was seen"
        )
    loaded = store.load(step)
    if loaded is None:
        raise CheckpointError(
            f"{shown(folder.root)}: no checkpoint was written yet; go on with: run resume {shown(folder.root)}"
        )
    device = build.build_device(spec, decide)
    model = build.build_model(spec, build.build_tokenizer(spec), device, decide)
    load_parameters(model.trainable(), loaded.state["policy"]["tensors"])
    model.eval()
    return model, loaded


def answer(
    model: Any, prompt: str, *, max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> Iterator[str]:
    """Pieces of the answer to a user's message, as they come."""
    ids = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    yield from model.stream(ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)


def export(folder: RunFolder, spec: JobSpec, checkpoint: int | Literal["best"] | None, out: Path | None) -> Path:
    """Write a Hugging Face folder or a PEFT adapter from a checkpoint; returns where."""
    target = out or folder.export
    if out is not None and out.exists() and any(out.iterdir()):
        raise EnvironmentProblem(f"{out} exists and is not empty; choose another --out")
    model, loaded = load_model(folder, spec, checkpoint)
    model.save(target)
    write_card(target, spec, loaded.step, loaded.metrics)
    return target


def prompts_of(path: Path) -> Sequence[str]:
    """One prompt per line of a text file; empty lines are left out."""
    if not path.is_file():
        raise EnvironmentProblem(f"{path}: no such file; one prompt per line is expected")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
