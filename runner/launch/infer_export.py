"""Uses what a run made: answers prompts from a checkpoint, or exports one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import EnvironmentProblem
from runner.data.tokenization import bos_and_eos
from runner.inference.model_source import Checkpoint, load_run
from runner.launch.export import write_export
from runner.run_dir.folder import RunFolder, hold_lock
from runner.run_dir.resume_compatibility import PromptStyle
from runner.spec.job import JobSpec

if TYPE_CHECKING:  # it brings torch, which may be broken
    from runner.interfaces import GenerativeModel


def stream_answer(
    model: GenerativeModel,
    prompt: str,
    style: PromptStyle,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Iterator[str]:
    """Pieces of the answer to a prompt, as they come. Raises EnvironmentProblem for a prompt without a token."""
    ids = prompt_ids(model.tokenizer, prompt, style)
    if not ids:
        raise EnvironmentProblem("the prompt is empty; type a text to go on from")
    yield from model.stream(ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)


def prompt_ids(tokenizer: Any, prompt: str, style: PromptStyle) -> list[int]:
    """A prompt in the tokens that training showed: a user's message, or plain text after what begins every text."""
    if style == "chat":
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(encoded["input_ids"])
    begin, _ = bos_and_eos(tokenizer)
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return ids if ids[:1] == begin[:1] else [*begin, *ids]


def export(
    folder: RunFolder, spec: JobSpec, checkpoint: Checkpoint, out: Path | None, merge: bool = False
) -> tuple[Path, int]:
    """Write a Hugging Face folder or a PEFT adapter from a checkpoint; returns where, and the checkpoint's step.

    Without `out` that is in the run's folder, which must not be running: export/ for the newest checkpoint,
    export-step-N/ for one that was named. `merge` writes an adapter merged into its base, to a name with -merged.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EnvironmentProblem(f"{out} exists and is not an empty folder; choose another --out")
    with hold_lock(folder) if out is None else nullcontext():
        model, loaded = load_run(folder, spec, checkpoint)
        if merge:
            model.merge_on_save()
        own = folder.export if checkpoint == "last" else folder.export_of(loaded.step)
        target = out or (own.with_name(f"{own.name}-merged") if merge else own)
        write_export(model, target, spec, loaded.step, loaded.metrics)
    return target, loaded.step


def is_adapter(export: Path) -> bool:
    """Whether an export is an adapter without its base."""
    return (export / "adapter_config.json").is_file()
