"""Find a model by the one notation that every verb and option takes, and load it.

text ─parse_source─▶ ModelSource ─load_source─▶ LoadedModel        parsing imports no torch

latest, a run's folder                 a checkpoint of a run
a folder with config.json              an export, or any Hugging Face model
a folder with adapter_config.json      a PEFT adapter; its base is the one it names, or the one given
OWNER/NAME, modelscope:OWNER/NAME      a model of the Hugging Face hub, of ModelScope
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from runner.core.auto_choices import Decisions
from runner.core.errors import CheckpointError, EnvironmentProblem, Problem, SpecError
from runner.data.config import ChatConfig
from runner.device.process_setup import load_torch, set_environment
from runner.model.model_folder import (
    MODELSCOPE,
    adapter_base,
    base_quantization,
    check,
    check_adapter_base,
    check_model_folder,
    exported_step,
    fetch_modelscope,
    is_adapter,
    is_cached,
    is_hub_id,
    refuse_gguf,
    says_plain_text,
)
from runner.run_dir.folder import RunFolder, display_path, find_trained_run, read_mapping, read_spec
from runner.run_dir.manifest import PromptStyle, check_model_unchanged, check_spec_unchanged
from runner.run_dir.user_files import with_copied_files
from runner.spec.base import COMMAND_LINE, iter_leaves
from runner.spec.decode import decode
from runner.spec.job import JobSpec

if TYPE_CHECKING:  # it brings torch, which may be broken
    from runner.checkpoint.step_folders import LoadedCheckpoint
    from runner.interfaces import GenerativeModel, TrainableModel
    from runner.model.transformers_model import TransformersModel

SETTABLE = ("device", "model.path", "model.base", "model.dtype", "model.trust_remote_code")  # of a run's spec
Checkpoint = int | Literal["best", "last"]


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A PEFT adapter's folder, and the name that requests choose it by."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is.

    text: as typed; name: what clients call it; path: the run's folder, the model's folder or its hub id; with
    `adapters`, that of their base; checkpoint: of a run; base: where a run's model.path lies now, None = where it was.
    """

    text: str
    kind: Literal["run", "folder", "hub", "modelscope"]
    name: str
    path: str
    checkpoint: Checkpoint = "last"
    adapters: tuple[AdapterSource, ...] = ()
    base: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, ready for requests.

    adapters: the name that a request chooses one by → its name in the peft model, where the first one is active.
    prompt_style: `text` where the model was trained on plain text, so that prompts are not rendered as chats.
    """

    name: str
    model: GenerativeModel
    tokenizer: Any
    prompt_style: PromptStyle
    adapters: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None  # of a run's checkpoint
    chat: ChatConfig = field(default_factory=ChatConfig)  # how a run rendered conversations
    stop: tuple[str, ...] = ()  # strings and ids at which a run's completions ended
    stop_token_ids: tuple[int, ...] = ()

    def stop_text(self) -> str:
        """What ends completions beside the model's own end, for a message; empty without any."""
        given = {"sampler.stop": list(self.stop), "sampler.stop_token_ids": list(self.stop_token_ids)}
        said = [f"{key}={value}" for key, value in given.items() if value]
        return f"completions end at the run's {' and '.join(said)}" if said else ""


def parse_source(
    text: str, *, checkpoint: Checkpoint = "last", base: str | None = None, adapters: Sequence[str] = ()
) -> ModelSource:
    """The model that `text` means. Reads folder names and small configs only.

    base: the base of an adapter or a run, where it is not where they name it; adapters: more of them, each
    `FOLDER` or `NAME=FOLDER`. Raises EnvironmentProblem where there is no such model, and what a damaged folder raises.
    """
    source = _parse_source(text, checkpoint, base, adapters)
    _check_folders(source, "model.path")
    return source


def _parse_source(text: str, checkpoint: Checkpoint, base: str | None, adapters: Sequence[str] = ()) -> ModelSource:
    source = _parse_model(text, checkpoint, base)
    if checkpoint != "last" and source.kind != "run":
        raise EnvironmentProblem(f"--checkpoint {checkpoint} is for a run, but {text} is not a run; leave it out")
    if base is not None and source.kind == "run":
        source = replace(source, base=base)
    elif base is not None and not source.adapters:
        raise EnvironmentProblem(f"--base {base} is for an adapter, but {text} is not an adapter; leave it out")
    named = (*source.adapters, *map(_parse_adapter, adapters))
    if len({adapter.name for adapter in named}) < len(named):
        names = ", ".join(adapter.name for adapter in named)
        raise EnvironmentProblem(f"two adapters have the same name ({names}); type names: --adapter NAME=FOLDER")
    return replace(source, adapters=named)


def _check_folders(source: ModelSource, key: str, *, needs_weights: bool = True) -> None:
    for path in (*(adapter.path for adapter in source.adapters), *([source.path] if source.kind == "folder" else ())):
        check_model_folder(Path(path), key, needs_weights=needs_weights)


def _parse_model(text: str, checkpoint: Checkpoint, base: str | None) -> ModelSource:
    if text.startswith(MODELSCOPE):
        hub_id = text.removeprefix(MODELSCOPE)
        return ModelSource(text, "modelscope", hub_id, hub_id)
    folder = Path(text).expanduser()
    if text == "latest" or (folder / "spec.yaml").is_file():
        return _parse_run(text, checkpoint)
    if is_adapter(folder) and not (folder / "config.json").is_file():
        where = folder.resolve()
        adapter = AdapterSource(_folder_name(where), str(where))
        below = _parse_model(base or adapter_base(where), "last", None)
        if below.adapters or below.kind == "run":
            raise EnvironmentProblem(
                f"{text}: its base, {below.text}, is not a full model; type its folder: --base FOLDER"
            )
        return replace(below, text=text, name=adapter.name, adapters=(adapter,))
    if (folder / "config.json").is_file():
        return ModelSource(text, "folder", _folder_name(folder.resolve()), str(folder.resolve()))
    given = "; expected latest, a run, the folder of a model or an adapter, or a hub id (OWNER/NAME)"
    if folder.exists():
        refuse_gguf(folder)
        hint = _folder_inside(folder) or given
        raise EnvironmentProblem(f"{text} is not a model: no spec.yaml, config.json or adapter_config.json{hint}")
    if is_hub_id(text) and ("/" in text or is_cached(text, os.environ)):
        return ModelSource(text, "hub", text, text)
    if text.startswith("tinker://"):
        given = "; type the checkpoint's folder: outputs/RUN/clients/*/weights/NAME"
    raise EnvironmentProblem(f"{text}: no such folder{given}")


def _parse_run(text: str, checkpoint: Checkpoint) -> ModelSource:
    """A run; with `latest`, the newest that has a checkpoint, and says so where that is not the newest."""
    run, passed_over = find_trained_run(text)
    if passed_over is not None:
        failed = read_mapping(passed_over.status).get("state") == "failed"
        why = "failed before its first checkpoint" if failed else "has no checkpoint yet"
        print(f"latest: {display_path(passed_over.root)} {why}; using the newest run that has one", file=sys.stderr)
    return ModelSource(text, "run", run.root.name, str(run.root), checkpoint)


def _parse_adapter(text: str) -> AdapterSource:
    name, equals, path = text.partition("=")
    folder = Path(path if equals else text).expanduser().resolve()
    if not is_adapter(folder):
        raise EnvironmentProblem(f"--adapter {text}: no adapter_config.json in {folder}; give a PEFT adapter's folder")
    return AdapterSource(name if equals else _folder_name(folder), str(folder))


def _folder_name(folder: Path) -> str:
    """What a model's folder is called by clients: an export by its run."""
    return folder.parent.name if folder.name.startswith("export") and folder.parent.name else folder.name


def _folder_inside(folder: Path) -> str:
    """A hint at the model one folder further in; of several checkpoints, the newest."""
    known = ("config.json", "adapter_config.json")
    inside = [path for path in folder.glob("*/") if any((path / name).is_file() for name in known)]
    newest = max(inside, key=lambda path: path.stat().st_mtime, default=None)
    return f"; did you mean {newest}?" if newest else ""


def fetch_source(source: ModelSource, revision: str | None = None) -> ModelSource:
    """The same source with its files on this machine: a ModelScope id is downloaded, at `revision`.

    Raises EnvironmentProblem, within seconds, for an id whose files can neither be found nor fetched.
    """
    if source.kind == "hub":
        check(source.path)
    if source.kind != "modelscope":
        return source
    return replace(source, kind="folder", path=fetch_modelscope(source.path, revision))


def load_source(
    source: ModelSource,
    *,
    dtype: Literal["float32", "bfloat16"] | None = None,
    device: str | Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """The model that a source means, on the device, in evaluation mode.

    dtype: None = bfloat16 on cuda and npu, float32 on cpu; device: a name, or its section of a spec, None = the fastest
    there is; a run has its own of both. Raises EnvironmentProblem, CheckpointError or SecurityError.
    """
    source = fetch_source(source)
    spec = source_spec(source, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    prepare_process(spec)
    from runner.interfaces import as_generative

    style: PromptStyle
    if source.kind == "run":
        model, loaded = load_run(RunFolder(Path(source.path)), spec, source.checkpoint)
        style, step = loaded.state["identity"]["prompt_style"], loaded.step
    else:
        model = _load_folder(spec)
        folder = Path(source.adapters[0].path if source.adapters else source.path)
        style = "chat" if model.tokenizer.chat_template and not says_plain_text(folder) else "text"
        step = None
    model, names = _attach_adapters(model, source)
    model.eval()
    if (generative := as_generative(model)) is None:
        text = f"{source.text}: this model scores completions, it cannot write text; use it as reward=model"
        raise EnvironmentProblem(f"{text} reward.path=EXPORT")
    return LoadedModel(
        source.name, generative, model.tokenizer, style, names, step, spec.chat, *spec.sampler.stop_criteria()
    )


def prepare_process(spec: JobSpec) -> None:
    """Set the environment that the spec's device needs, and import torch. Raises EnvironmentProblem."""
    set_environment(spec, Decisions(spec.strict))
    load_torch(spec.device.name)


def source_spec(
    source: ModelSource,
    *,
    dtype: str | None = None,
    device: str | Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> JobSpec:
    """The spec that a source is built from: a run's own, or that of a job which only has a model."""
    model: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    model |= {"dtype": dtype} if dtype else {}
    section = {"device": {"name": device} if isinstance(device, str) else device} if device else {}
    origins: dict[str, str] = {}
    if source.kind == "run":
        data = read_spec(RunFolder(Path(source.path))).data
        origins = {key: "spec.yaml" for key, _ in iter_leaves(data)}
        model = {**data["model"], **model, **({"path": source.base} if source.base else {})}
    else:
        data = {**_EMPTY_JOB, "device": {"name": "auto"}, "adapter": {"name": "none"}}
        data["data"] = {"name": "demo", "max_length": 2}  # no row is read, so that no model is too short
        model |= {"name": "hf", "path": source.path}
        if source.adapters:
            model |= {"path": source.adapters[0].path, "base": source.path}
            data["adapter"] = {"name": "lora"}
    origins["model.trust_remote_code"] = COMMAND_LINE if trust_remote_code else "spec.yaml"
    spec = decode({**data, **section, "model": model}, origins)
    scheme = base_quantization(source.adapters[0].path) if source.adapters else None
    if scheme is not None:
        model["quantization"] = None if spec.device.quantization_problem() else scheme
        here = f"here, too: {scheme}" if model["quantization"] else "here it is not, so answers differ a little"
        print(f"{source.adapters[0].path}: trained on a base that was quantized; {here}", file=sys.stderr)
        spec = decode({**data, **section, "model": model}, origins)
    return spec


log = logging.getLogger("runner")
_EMPTY_JOB: dict[str, Any] = {
    **{group: {"name": "none"} for group in ("sampler", "reward", "environment", "tracker")},
    "parallelism": {"name": "single"},
    "launch": {"name": "local"},
    "algorithm": {"name": "sft"},
    "optimizer": {"name": "adamw"},
    "schedule": {"name": "constant"},
    "checkpoint": {"name": "safetensors"},
}


def _load_folder(spec: JobSpec) -> TrainableModel:
    from runner import build

    decide = Decisions()
    device = build.build_device(spec, decide)
    model: TrainableModel = build.build_model(spec, build.build_tokenizer(spec, decide), device, decide, trains=False)
    return model


def load_run(
    folder: RunFolder, spec: JobSpec, checkpoint: Checkpoint = "last"
) -> tuple[TrainableModel, LoadedCheckpoint]:
    """A run's model at a checkpoint, in evaluation mode, and that checkpoint.

    Raises CheckpointError if there is none or the base model is another, SpecError if spec.yaml was changed.
    """
    from runner import build
    from runner.trainer.optimizer_state import load_parameters

    if note := read_spec(folder).note:
        log.warning("%s: %s", display_path(folder.root), note)
    decide = Decisions(spec.strict)
    store = build.build_store(spec, folder)
    step = checkpoint if isinstance(checkpoint, int) else None
    if checkpoint == "best" and (step := store.best()) is None:
        why = "no best checkpoint; the run did not measure checkpoint.best; type --checkpoint last"
        raise CheckpointError(f"{display_path(folder.root)}: {why}")
    loaded = store.load(step)
    if loaded is None:
        hint = folder.next_step_hint(min(spec.checkpoint.every or spec.steps, spec.steps))
        if saved := ", ".join(map(display_path, sorted(folder.root.glob("clients/*/weights/*")))):
            hint = f"those of its training clients are folders: {saved}"
        raise CheckpointError(f"{display_path(folder.root)}: no checkpoint was written yet; {hint}")
    check_spec_unchanged(spec, loaded.state["identity"], free=SETTABLE)
    device = build.build_device(spec, decide)
    role, head = next(iter(spec.algorithm.trained_models().items()))
    tokenizer = build.build_tokenizer(with_copied_files(spec, folder), decide)
    model: TrainableModel = build.build_model(spec, tokenizer, device, decide, head)
    check_model_unchanged(model.base_fingerprint, loaded.state["identity"])
    load_parameters(model.trainable(), loaded.state[role]["tensors"])
    model.eval()
    return model, loaded


def _attach_adapters(model: TrainableModel, source: ModelSource) -> tuple[TrainableModel, dict[str, str]]:
    """The model with every adapter of its source, the first one attached already; and their peft names."""
    if not source.adapters:
        return model, {}
    if source.kind == "run":
        text = f"{source.text}: adapters need a model's folder or a hub id, but this is a run; export it first"
        raise EnvironmentProblem(f"{text}: run export {source.text} --merge")
    from runner.model.peft_adapter import attach_adapter

    decide, quantization = Decisions(), cast("TransformersModel", model).config.quantization
    first, *more = source.adapters
    names = {first.name: "default"}
    for index, adapter in enumerate(more, 1):
        names[adapter.name] = f"adapter{index}"
        check_adapter_base(Path(adapter.path), source.path, decide, quantization)
        attach_adapter(model.module, Path(adapter.path), name=names[adapter.name])
    return model.with_peft_module(model.module, decide=decide) if more else model, names


def resolve_model_path(
    path: str, key: str, base: str | None = None, needs_weights: bool = True, revision: str | None = None
) -> str:
    """The folder or hub id that `path`, the value of the option `key`, means.

    A run is its export; a model of ModelScope is downloaded, at `revision`. Raises SpecError, and what a damaged
    folder raises.
    """
    try:
        source = _parse_source(path, "last", base)
        if source.kind == "modelscope":  # of the hub: a job's preflight
            source = fetch_source(source, revision)
    except EnvironmentProblem as error:
        raise SpecError([Problem(key, str(error))]) from error
    if source.kind == "hub" and not source.adapters:
        print(f"{key}: no folder {path} here, so it is read as a hub id", file=sys.stderr)
        return source.path
    folder = Path(source.adapters[0].path if source.adapters else source.path)
    if source.kind == "run":
        newest, folder = max(RunFolder(folder).saved_steps, default=0), RunFolder(folder).export
        if not folder.is_dir():
            raise SpecError([Problem(key, f"{path} is a run without an export; to write one, type: run export {path}")])
        if (step := exported_step(folder)) is not None and step < newest:
            text = f"{path} is read as its export of step {step}, older than its newest checkpoint, {newest}"
            print(f"{key}: {text}; to export that, type: run export {path}", file=sys.stderr)
        source = replace(source, kind="folder", path=str(folder))
    _check_folders(source, key, needs_weights=needs_weights)
    return str(folder)
