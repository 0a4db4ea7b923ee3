"""Exports a run's checkpoint or adapters, and tokenizes prompts for `run infer`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runner.core.device_kinds import NPU
from runner.core.errors import DataError, EnvironmentProblem
from runner.data.config import ChatConfig
from runner.data.examples import PromptExample, user_message
from runner.data.readers import Problems, SourceLocation
from runner.data.tokenization import EncodedAnswers, ExampleTokenizer
from runner.inference.model_source import Checkpoint, LoadedModel, ModelSource, load_run, load_source
from runner.launch.export import (
    CardFacts,
    CheckFolder,
    card_facts,
    public_name,
    staged_folder,
    write_card_text,
    write_export,
)
from runner.launch.run_messages import ChatMarkers, plain_sample
from runner.model.model_folder import base_quantization, is_adapter, says_plain_text
from runner.run_dir.folder import RunFolder, display_path, hold_lock
from runner.run_dir.manifest import PromptStyle
from runner.spec.job import JobSpec
from runner.tracker.jsonl import complete_lines


def prompt_ids(
    tokenizer: Any, prompt: str, style: PromptStyle, chat: ChatConfig | None = None, images: Sequence[Path] = ()
) -> list[int]:
    """A prompt tokenized as in training: a user's message, or plain text after the start token.

    images: before the text of a message. Raises DataError for an empty plain prompt, and for an image that is none.
    """
    content = (user_message(prompt, images),) if style == "chat" else prompt
    problems = Problems("prompt", "command line")
    asked = PromptExample(SourceLocation("prompt", 1), content)
    rows = ExampleTokenizer(tokenizer, chat).encode([asked], problems)
    problems.raise_if_any()
    assert isinstance(rows[0], EncodedAnswers)
    if not rows[0].prompt:
        raise DataError("the prompt is empty; type a text to continue")
    return rows[0].prompt


@dataclass(frozen=True, slots=True)
class ExportResult:
    """An export. check: the result of the comparison, None = not compared."""

    folder: Path
    step: int
    check: object | None


def export(
    folder: RunFolder,
    spec: JobSpec,
    checkpoint: Checkpoint,
    out: Path | None,
    *,
    merge: bool = False,
    check: bool | None = None,
    other: Path | None = None,
    quantize: str | None = None,
) -> ExportResult:
    """Write a Hugging Face folder or a PEFT adapter from a checkpoint.

    Without `out` it is written to the run's folder, which must not be running: export/ for the newest checkpoint,
    export-step-N/ for a named one. merge: write an adapter merged into its base, to a folder with -merged. check:
    compare the folder with the run's model (see `check_export`); None = if its weights are below 2 GB, or with `other`,
    the Python of another environment that is to load the folder too; quantize: write it in few bits too, by the
    llmcompressor of `other`.
    """
    if quantize == "w4a16" and spec.device.kind is NPU:
        raise EnvironmentProblem("--quantize w4a16: vllm-ascend has it for expert layers only\n  type --quantize w8a8")
    if (check or other) and not quantize and next(iter(spec.algorithm.trained_models().values())) == "scalar":
        raise EnvironmentProblem("--check and --with compare answers, and a reward model has none; leave them out")
    from runner.interfaces import as_generative
    from runner.launch.export_check import LARGEST_CHECKED, check_export, run_prompts
    from runner.launch.quantized_export import refuse_quantizing, write_quantized_export

    outs = [] if out is None else [out, *([out.with_name(f"{out.name}-{quantize}")] if quantize else [])]
    for taken in (one for one in outs if one.exists() and (not one.is_dir() or any(one.iterdir()))):
        raise EnvironmentProblem(f"{taken} exists and is not an empty folder; choose another --out")
    with hold_lock(folder) if out is None else nullcontext():
        model, loaded = load_run(folder, spec, checkpoint)
        if merge:
            model.merge_on_save()
        if quantize is not None and other is not None:
            refuse_quantizing(model, other)
        own = folder.export if checkpoint == "last" else folder.export_of(loaded.step)
        target = out or (own.with_name(f"{own.name}-merged") if merge else own)
        style = loaded.state["identity"]["prompt_style"]
        samples = _evaluation_samples(folder, loaded.step, model.tokenizer, style, spec.chat)
        facts = CardFacts(loaded.step, loaded.metrics, style, samples)
        generative, size = as_generative(model), sum(p.numel() * p.element_size() for p in model.module.parameters())
        check_folder: CheckFolder | None = None
        if check is not False and generative is not None and (check or other or size <= LARGEST_CHECKED):
            prompts = run_prompts(folder, model.tokenizer, style, spec.chat)
            check_folder = partial(check_export, generative, prompts=prompts, style=style, other=other)
        found = write_export(model, target, spec, facts, check_folder)
        if quantize is not None and other is not None and generative is not None:
            prompts = run_prompts(folder, model.tokenizer, style, spec.chat)
            target, found = write_quantized_export(generative, target, quantize, other, prompts, style)
    return ExportResult(target, loaded.step, found)


def _evaluation_samples(
    folder: RunFolder, step: int, tokenizer: Any, style: PromptStyle, chat: ChatConfig
) -> list[Mapping[str, Any]]:
    """Three samples of the last evaluation until a step, as plain text."""
    every = map(json.loads, complete_lines(folder.samples))
    rows = [row for row in every if row.get("step", 0) <= step and "answer" in row]
    last = max((row["step"] for row in rows), default=0)
    markers = ChatMarkers.from_tokenizer(tokenizer, chat) if style == "chat" else None
    return [plain_sample(row, markers) for row in rows if row["step"] == last][:3]


NOT_COMBINED = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices")  # options of a LoraConfig


def combine_adapters(
    source: ModelSource,
    out: Path,
    how: str | None,
    weights: Sequence[float],
    density: float,
    merge: bool,
    **loading: Any,
) -> None:
    """Write a source's adapters as one, combined by peft; with `merge`, merged into the base.

    how: peft's combination type; weights: one per adapter; density: for ties and dare. Raises EnvironmentProblem if
    peft cannot combine them, also where it leaves some of their tensors out without an error.
    """
    from runner.model.export import write_image_processor, write_model, write_tokenizer  # they bring torch

    folders = [Path(adapter.path) for adapter in source.adapters]
    if len({says_plain_text(folder) for folder in folders}) > 1:
        text = "some of the adapters were trained on plain text, and others on chats"
        raise EnvironmentProblem(f"--combine {how}: {text}\n  combine those of one kind")
    loaded = load_source(source, **loading)
    module: Any = loaded.model.module
    active = "default" if how is None else _add_combined(module, list(loaded.adapters.values()), how, weights, density)
    with staged_folder(out) as new:
        if merge or module.peft_config[active].target_parameters:  # which peft below 0.17 and vLLM ignore
            loaded.model.merge_on_save()
            loaded.model.save(new)
        else:
            write_model(module, new)
            for path in (new / active).iterdir():  # where peft writes an adapter that is not named default
                shutil.move(path, new / path.name)
            (new / active).rmdir()
            write_tokenizer(new, loaded.tokenizer)
            write_image_processor(loaded.model.weights_source, new, loaded.tokenizer)
        _write_adapters_card(new, source, loaded, weights, how)


def _add_combined(module: Any, names: list[str], how: str, weights: Sequence[float], density: float) -> str:
    """Combine a peft model's adapters into one, which is left; returns its name.

    Raises EnvironmentProblem.
    """
    lost = [name for name in NOT_COMBINED if any(getattr(module.peft_config[one], name, None) for one in names)]
    if lost:
        text = f"peft would leave out what an adapter trains by {' and '.join(lost)}"
        raise EnvironmentProblem(f"--combine {how}: {text}\n  merge each adapter into its base: --merge")
    module.peft_config[names[0]].use_rslora = False  # peft copies it, and would scale the combined one by it again
    options = {"density": density} if how.startswith(("ties", "dare")) else {}
    try:
        module.add_weighted_adapter(names, list(weights), "combined", combination_type=how, **options)
    except (ValueError, RuntimeError) as error:
        raise EnvironmentProblem(f"--combine {how}: {error}") from error
    module.set_adapter("combined")
    for name in names:
        module.delete_adapter(name)
    return "combined"


def _write_adapters_card(
    folder: Path, source: ModelSource, loaded: LoadedModel, weights: Sequence[float], how: str | None
) -> None:
    """Write a card with what those of the adapters record for later commands."""
    from runner.model.auto_class import auto_class_name  # it brings torch

    recorded = base_quantization(source.adapters[0].path)
    base = loaded.model.base_fingerprint.get("weights") if is_adapter(folder) else None
    head: dict[str, object] = {"base_model": source.path} if source.kind == "hub" else {}
    head |= card_facts(folder, loaded.prompt_style, base, recorded)
    names = ", ".join(f"{one.name} × {weight:g}" for one, weight in zip(source.adapters, weights, strict=True))
    rows = [("base model", public_name(source.path)), ("adapters", names), *([("combined by", how)] if how else [])]
    write_card_text(folder, folder.name, auto_class_name(loaded.model.inner), head, rows)


def push(folder: Path, target: str) -> str:
    """Upload an exported folder; returns its address. Raises EnvironmentProblem.

    A new repository is private. One that exists stays as it is. target: hub:OWNER/NAME or modelscope:OWNER/NAME.
    """
    where, _, name = target.partition(":")
    try:
        if where == "modelscope":
            from modelscope.hub.api import HubApi

            hub = HubApi()
            hub.create_repo(repo_id=name, visibility="private", exist_ok=True)  # upload_folder's own would be public
            hub.upload_folder(repo_id=name, folder_path=str(folder))
            return f"https://modelscope.cn/models/{name}"
        from huggingface_hub import HfApi

        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
        return str(address)
    except ImportError as error:
        text = "--push modelscope needs the package modelscope: pip install 'posttrain-run[modelscope]'"
        raise EnvironmentProblem(text) from error
    except Exception as error:  # of requests, httpx and the libraries
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        login = "hf auth login" if where == "hub" else "modelscope login"
        raise EnvironmentProblem(
            f"--push {target}: {first}\n"
            f"  the export is complete in {display_path(folder)}; log in ({login}) and try again"
        ) from error
