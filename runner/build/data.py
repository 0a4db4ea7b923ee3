"""The data of a job and the length of its items.

Where data.max_length is null, items may be as long as the model allows. All is checked before the model is read.
"""

from __future__ import annotations

from typing import Any

from runner.build.result_check import build_component
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, Problem, SpecError
from runner.core.package import cache_folder
from runner.data.config import DataConfig
from runner.data.formats import VARIABLE_COLUMNS
from runner.interfaces import Data
from runner.interfaces.media import images_of
from runner.model.batch_layout import max_row_length
from runner.spec.base import ItemKind
from runner.spec.job import JobSpec
from runner.spec.registry import resolve

PARALLELISM_WITHOUT_IMAGES = {
    "tp": "the vision part is not cut over tensor-parallel ranks",
    "cp": "the places of an image may lie on several context-parallel ranks",
    "pp": "the first stage alone would run the vision part",
    "ep": "expert-parallel ranks exchange tokens while others may still run the vision part",
}


def build_data(
    spec: JobSpec, tokenizer: Any, decide: Decisions, config: DataConfig | None = None, kind: ItemKind | None = None
) -> Data:
    """The data, read, checked and tokenized: of the job, or of `config` as items of `kind`.

    Raises UnsupportedModelError for a model without the head that is trained, before that.
    """
    if "scalar" in spec.algorithm.trained_models().values() and (factory := type(spec.model).architecture_factory):
        resolve(factory)(spec.model, tokenizer, spec.init_from, head="scalar")
    config, kind = config or spec.data, kind or spec.algorithm.item_kind
    if (reader := images_of(tokenizer)) and config.keeps_images:
        folder = cache_folder() / "images"
        if removed := reader.keep_in(folder):
            decide.record_fact(str(folder), f"{removed} images removed", "no job has used them for 30 days")
    chat = spec.chat.model_copy(update={"train_on": "all"}) if spec.algorithm.loss_on_prompt else spec.chat
    data: Data = build_component(
        config,
        tokenizer=tokenizer,
        chat=chat,
        seed=spec.seed,
        decide=decide,
        cache_dir=cache_folder(),
        kind=kind,
        length_limit=_item_length_limit(spec, tokenizer, kind),
    )
    if kind == "pairs" and "margin" in data.columns and not spec.algorithm.uses_margin():
        decide.record_fact(
            "data.rename_columns", "not read: margin", "only algorithm=rm algorithm.use_margin=true reads it"
        )
    own = sorted({*VARIABLE_COLUMNS} & {*data.columns})
    if own and data.prompt_style == "chat" and spec.environment.most_turns() > 1:
        text = f"column {own[0]}: rows with variables of their own for the chat template have one turn, but"
        raise DataError(f"{text} environment={spec.environment.name} continues them\n  set chat.kwargs for all rows")
    return data


def _item_length_limit(spec: JobSpec, tokenizer: Any, kind: ItemKind) -> tuple[int, str] | None:
    """The most tokens of an item by the model, and why; None = any. Raises SpecError if none is left."""
    factory = type(spec.model).architecture_factory
    limit = max_row_length(resolve(factory)(spec.model, tokenizer, spec.init_from)) if factory else None
    if limit is None or kind != "prompts" or not (answer := spec.sampler.answer_tokens()):
        return limit
    if limit[0] <= answer + 1:
        text = f"{answer} new tokens leave no room for a prompt: {limit[1]}; lower it"
        raise SpecError([Problem("sampler.max_new_tokens", text)])
    return limit[0] - answer, f"{limit[1]}, {answer} of them for an answer (sampler.max_new_tokens)"


def check_images(spec: JobSpec, tokenizer: Any) -> None:
    """Raise SpecError for what does not run with images, and for their options where there are none."""
    reader = images_of(tokenizer)
    if reader is None or not reader.is_used:
        unused = [f"data.{name}" for name, value in spec.data.pixel_limits().items() if value is not None]
        is_set = spec.model.source is not None and spec.model.frozen_parts not in (
            None,
            ("vision", "aligner"),
            ("router",),
        )
        unused += ["model.freeze"] if is_set else []
        if unused:
            raise SpecError([Problem(name, "the data has no images; leave it out") for name in unused])
        return
    sizes = spec.parallelism.mesh(spec.launch.world)._asdict()
    found = [
        Problem(f"parallelism.{name}", f"{why}, so images do not run with it; type parallelism=ddp or fsdp")
        for name, why in PARALLELISM_WITHOUT_IMAGES.items()
        if sizes[name] > 1
    ]
    if spec.parallelism.deepspeed:
        text = "DeepSpeed gathers the vision part in forwards that only ranks with images run"
        found.append(Problem("parallelism", f"{text}; type parallelism=ddp or fsdp"))
    if spec.algorithm.needs_sampler and spec.sampler.served:
        text = "OpenAI's completions take no images beside token ids; type sampler=torch or sampler=vllm"
        found.append(Problem("sampler", text))
    if spec.algorithm.needs_reward and spec.reward.runs_model:
        found.append(Problem("reward", "a reward model is given no images; type another reward, such as reward=exact"))
    if found:
        raise SpecError(found)


def resolve_max_length(spec: JobSpec, data: Data, decide: Decisions) -> JobSpec:
    """The spec with the length of the data's longest item where data.max_length is null. Raises SpecError."""
    if spec.data.max_length is not None:
        return spec
    resolved = spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": data.longest})})
    if problems := resolved.sampler.problems(resolved):
        raise SpecError([Problem(key, text, "data.max_length=null") for key, text in problems])
    reason = "no item of the data is longer, and the model allows it"
    if spec.data.is_stream:
        reason = "the most that the model allows, as the rows of a stream are not known"
    decide.record_fact("data.max_length", str(data.longest), reason)
    return resolved
