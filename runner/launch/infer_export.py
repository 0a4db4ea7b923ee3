"""Uses what a run made: answers prompts from a checkpoint, or exports one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner import build
from runner.checkpoint.reader import LoadedCheckpoint
from runner.core.auto_choices import Decisions
from runner.core.errors import CheckpointError, DataError, EnvironmentProblem, SpecError
from runner.data.config import ChatConfig
from runner.data.examples import PromptExample
from runner.data.readers import Problems, SourceLocation
from runner.data.tokenization import ExampleTokenizer
from runner.launch.export import write_export
from runner.launch.local import read_status
from runner.run_dir.folder import RunFolder, display_path, hold_lock
from runner.run_dir.resume_compatibility import PromptStyle, check_model_unchanged, check_spec_unchanged
from runner.spec.job import JobSpec
from runner.trainer.optimizer_state import load_parameters

if TYPE_CHECKING:  # it brings torch, which may be broken
    from runner.interfaces import GenerativeModel

SETTABLE = ("device", "model.path", "model.trust_remote_code")  # what a use may set of a run's spec


def load_model(
    folder: RunFolder, spec: JobSpec, checkpoint: int | Literal["best"] | None
) -> tuple[Any, LoadedCheckpoint]:
    """A run's model in evaluation mode at a checkpoint (a step, "best", the newest); and that checkpoint.

    Raises CheckpointError if there is none or the base model is another, SpecError if spec.yaml is not the one it was
    written under.
    """
    decide = Decisions(spec.strict)
    store = build.build_store(spec, folder)
    step = checkpoint if isinstance(checkpoint, int) else None
    if checkpoint == "best" and (step := store.best()) is None:
        raise CheckpointError(
            f"{display_path(folder.root)}: no best checkpoint; checkpoint.best names no metric that was seen"
        )
    loaded = store.load(step)
    if loaded is None:
        raise CheckpointError(
            f"{display_path(folder.root)}: no checkpoint was written yet; {_next_step_hint(folder, spec)}"
        )
    check_spec_unchanged(spec, loaded.state["identity"], free=SETTABLE)
    device = build.build_device(spec, decide)
    role, head = next(iter(spec.algorithm.trained_models().items()))
    model = build.build_model(spec, build.build_tokenizer(spec), device, decide, head)
    check_model_unchanged(model.base_fingerprint, loaded.state["identity"])
    load_parameters(model.trainable(), loaded.state[role]["tensors"])
    model.eval()
    return model, loaded


def _next_step_hint(folder: RunFolder, spec: JobSpec) -> str:
    """What to do about a run without a checkpoint."""
    known = read_status(folder)
    resume = f"continue: run resume {display_path(folder.root)}"
    if known.get("state") == "running":
        first = min(spec.checkpoint.every or spec.steps, spec.steps)
        return f"if it is running, the first one comes after step {first}; if it was killed, {resume}"
    if known.get("exit_code") in (SpecError.exit_code, DataError.exit_code):
        return f"it failed: {str(known.get('error')).splitlines()[0]}; correct that and start a new run"
    return resume


def stream_answer(
    model: GenerativeModel,
    prompt: str,
    style: PromptStyle,
    *,
    chat: ChatConfig | None = None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Iterator[str]:
    """Pieces of the answer to a prompt, as they come. Raises EnvironmentProblem for an empty prompt."""
    if not hasattr(model, "stream"):
        raise EnvironmentProblem(
            "this run made a model that scores answers; it writes none; to use it: reward=model reward.path=EXPORT"
        )
    ids = prompt_ids(model.tokenizer, prompt, style, chat)
    if not ids:
        raise EnvironmentProblem("the prompt is empty; type a text to continue from")
    yield from model.stream(ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)


def prompt_ids(tokenizer: Any, prompt: str, style: PromptStyle, chat: ChatConfig | None = None) -> list[int]:
    """A prompt in the tokens that training showed: a user's message, or plain text after what begins every text."""
    said = ({"role": "user", "content": prompt},) if style == "chat" else prompt
    problems = Problems("prompt", "what was typed")
    asked = PromptExample(SourceLocation("prompt", 1), said)
    [ids] = ExampleTokenizer(tokenizer, chat).encode_prompts([asked], problems)
    problems.raise_if_any()
    return ids or []


def export(
    folder: RunFolder, spec: JobSpec, checkpoint: int | Literal["best"] | None, out: Path | None, merge: bool = False
) -> tuple[Path, int]:
    """Write a Hugging Face folder or a PEFT adapter; returns its path and the checkpoint's step.

    Without `out` that is in the run's folder, which must not be running: export/ for the newest checkpoint,
    export-step-N/ for one that was named. `merge` writes an adapter merged into its base, to a name with -merged.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EnvironmentProblem(f"{out} exists and is not an empty folder; choose another --out")
    with hold_lock(folder) if out is None else nullcontext():
        model, loaded = load_model(folder, spec, checkpoint)
        if merge:
            model.merge_on_save()
        own = folder.export if checkpoint is None else folder.export_of(loaded.step)
        target = out or (own.with_name(f"{own.name}-merged") if merge else own)
        write_export(model, target, spec, loaded.step, loaded.metrics)
    return target, loaded.step


def is_adapter(export: Path) -> bool:
    """Whether an export is an adapter without its base."""
    return (export / "adapter_config.json").is_file()


def read_prompts(path: Path) -> Sequence[str]:
    """One prompt per line of a text file; empty lines are left out."""
    if not path.is_file():
        raise EnvironmentProblem(f"{path}: no such file; one prompt per line is expected")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
