"""The parts of jobs: device, tokenizer, data, models, learners, checkpoints, reward and environments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runner.algorithm.base import FrozenModelSpec
from runner.build.learners import build_learner
from runner.build.result_check import build_component
from runner.checkpoint.store import CheckpointStore
from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError, UnsupportedModelError
from runner.core.package import cache_folder
from runner.core.rng import derive_seed
from runner.data.config import ChatConfig
from runner.interfaces import (
    Device,
    GenerativeModel,
    Model,
    Role,
    TrainableModel,
)
from runner.model.flops import ModelFlops
from runner.model.initial_weights import DTYPES, InstallFusedOps
from runner.model.model_folder import has_tokenizer
from runner.model.shared_prompt_attention import merge_objection
from runner.model.transformers_model import TransformersModel
from runner.parallelism.parallel_context import ParallelContext
from runner.run_dir.folder import RunFolder
from runner.spec.base import Dtype, Head
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry, resolve
from runner.trainer.learner import LocalLearner

if TYPE_CHECKING:
    from runner.trainer.reference_model import FrozenModel

log = logging.getLogger("runner")


def build_device(spec: JobSpec, decide: Decisions) -> Device:
    """The device, ready to be used."""
    device: Device = default_registry().factory(spec.device)(spec.device, decide=decide)
    device.prepare()
    _check_dtypes(spec, device)
    report_float32(spec, decide)
    if spec.model.activation_offloading and device.torch_device.type == "cpu":  # which device=auto has become
        text = f"device={spec.device.name} is the CPU here, which already has activations in host memory"
        raise SpecError([Problem("model.activation_offloading", f"{text}; leave it out")])
    return device


def _check_dtypes(spec: JobSpec, device: Device) -> None:
    """Raise SpecError for every requested data type that the device cannot compute with."""
    asked: dict[str, Dtype] = {"model.dtype": spec.model.compute_dtype}
    if spec.algorithm.needs_reward and (reward := spec.reward.model_dtype()):
        asked["reward.dtype"] = reward
    asked |= {f"algorithm.{role}_dtype": one.dtype for role, one in spec.algorithm.frozen_models().items() if one.dtype}
    reasons = {key: device.unsupported_reason(DTYPES[name]) for key, name in asked.items()}
    if found := [Problem(key, f"{why}; type {key}=float32") for key, why in reasons.items() if why]:
        raise SpecError(found)


def report_float32(spec: JobSpec, decide: Decisions) -> None:
    """Say what a card gives up that computes in float32."""
    reached = spec.device.float32_peak
    if spec.model.compute_dtype == "float32" and reached is not None:
        decide.record_fact("model.dtype", "float32", f"{reached}; model.dtype=bfloat16 reaches the full peak")


def build_tokenizer(spec: JobSpec, decide: Decisions) -> Any:
    """The model's tokenizer with chat template and reader of images. Raises as `install_template`."""
    from runner.data.chat_template import install_template

    tokenizer = resolve(type(spec.model).tokenizer_factory)(spec.model)
    if factory := type(spec.model).image_reader_factory:
        tokenizer.image_reader = resolve(factory)(spec.model, tokenizer, **spec.data.pixel_limits())
    install_template(tokenizer, spec.chat, decide)
    return tokenizer


def compare_tokenizers(spec: JobSpec, tokenizer: Any, decide: Decisions) -> None:
    """Compare the job's tokenizer and chat template with those of `init_from`.

    Raises SpecError for other ids; a fact names another template.
    """
    folder = spec.init_from
    if folder is None or not has_tokenizer(folder):
        return
    from runner.model import hf
    from runner.model.config import HfConfig

    own = spec.model.source or f"model={spec.model.name}"
    source = HfConfig(path=folder, tokenizer=folder, trust_remote_code=spec.model.runs_remote_code)
    theirs = hf.tokenizer(source, "init_from")
    if theirs.get_vocab() != tokenizer.get_vocab() and not spec.model.tokenizer_source:
        option = "model.tokenizer" if spec.model.source else "leave init_from out and type model=hf model.path"
        text = f"{folder} has a tokenizer with other ids than {own}, which its weights would misread; type {option}"
        raise SpecError([Problem("init_from", f"{text}={folder}")])
    if theirs.chat_template not in (None, tokenizer.chat_template):
        reason = f"{folder}, whose weights are trained, has another one: chat.template={folder}/chat_template.jinja"
        decide.record_fact("chat template", spec.chat.template or f"of {own}", reason)


def build_model(
    spec: JobSpec,
    tokenizer: Any,
    device: Device,
    decide: Decisions,
    head: Head = "lm",
    world: ParallelContext | None = None,
    trains: bool = True,
) -> Any:
    """The model with its adapter, on the device, or this rank's part of it; frozen without `trains`."""
    make = _model_factory(spec, tokenizer, decide, head, world, trains)
    model = _place_model(make, world, device, decide, spec.model.kernels)
    if spec.model.compile:
        model.compile(decide)
    elif spec.model.compile is None and world is not None and device.torch_device.type == spec.device.compiles_for:
        if reason := spec.model.compile_objection(spec):
            decide.record_fact("model.compile", "false", reason)
        else:
            model.compile(decide)
    return model


def build_blank_model(spec: JobSpec, tokenizer: Any, decide: Decisions, head: Head = "lm") -> Any:
    """The same without its numbers, on `meta`: for what only has to know what it is made of."""
    from runner.parallelism.weight_scatter import META

    with META:
        return _model_factory(spec, tokenizer, decide, head, None)(META, None)


def _model_factory(
    spec: JobSpec, tokenizer: Any, decide: Decisions, head: Head, world: ParallelContext | None, trains: bool = True
) -> Callable[[torch.device, InstallFusedOps | None], Any]:
    """A function that builds the model with its adapter on a device; raises SpecError without this head."""

    def make(where: torch.device, fit: InstallFusedOps | None) -> Any:
        try:
            model = default_registry().factory(spec.model)(
                spec.model,
                tokenizer=tokenizer,
                device=where,
                seed=derive_seed(spec.seed, "weights"),
                decide=decide,
                head=head,
                init_from=spec.init_from,
                longest=longest_row(spec),
                fit=fit,
                admit=None if world is None else world.check_divisible,
                stored=spec.stored_dtype(trains=trains),
            )
        except UnsupportedModelError as error:
            raise SpecError([Problem(*spec.algorithm.suggest_instead(head, str(error)))]) from error
        if head != "scalar" and tokenizer.chat_template:
            _stop_at_turn_ends(model.inner, tokenizer, spec.chat, decide)
        model = build_component(spec.adapter, model, decide=decide)
        if trains and not model.trainable():
            text = (
                f"all weights of the adapter {model.weights_source.adapter} are in frozen parts; remove a part to train"
            )
            raise SpecError([Problem("model.freeze", text)])
        if trains and head != "scalar" and "adapter" in spec.sampler.weights_to_send():
            _check_sent_adapter(spec, model)  # here, where it is known what was adapted, and no engine has started
        return model

    return make


def _check_sent_adapter(spec: JobSpec, model: Any) -> None:
    """Raise SpecError for an adapter, made or loaded, that vLLM ignores or does not support."""
    config = model.module.peft_config[model.module.active_adapter]
    remedy = f"type sampler.weight_sync={'reload' if spec.sampler.served else 'merged'}"
    if names := config.target_parameters:
        text = f"vLLM ignores an adapter on experts and routers ({', '.join(sorted(names))}) without an error"
        raise SpecError([Problem("sampler.weight_sync", f"{text}; {remedy}, or adapter.targets=[q_proj,v_proj]")])
    for option in ("modules_to_save", "use_dora"):
        if getattr(config, option):
            text = f"vLLM does not support {option} of {model.weights_source.adapter}; {remedy}"
            raise SpecError([Problem("sampler.weight_sync", text)])


def _stop_at_turn_ends(inner: Any, tokenizer: Any, chat: ChatConfig, decide: Decisions) -> None:
    """Add the tokens that end a turn of the chat template to the end tokens of a transformers model.

    Whoever generates with the model, or with its export, reads them there.
    """
    from runner.data.chat_template import ChatTemplate
    from runner.model.generation import eos_token_ids

    known, ends = eos_token_ids(inner, tokenizer), ChatTemplate(tokenizer, chat).end_token_ids()
    if ends <= known:
        return
    inner.generation_config.eos_token_id = sorted(known | ends)
    names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(ends - known)))
    text = f"{names} ends a turn of the chat template, and generation, too"
    decide.record_fact("generation_config.eos_token_id", str(inner.generation_config.eos_token_id), text)


def _place_model(
    make: Callable[[torch.device, InstallFusedOps | None], Any],
    world: ParallelContext | None,
    device: Device,
    decide: Decisions,
    kernels: str | None,
) -> Any:
    """The model that `make` builds, with the device's operators and attention, distributed over the ranks."""
    if world is None or world.place.size == 1:
        model = make(device.torch_device, device_op_installer(device, decide, kernels))
    else:
        model = world.load(lambda where: make(where, None))
        world.shard(model, decide)
        if (pad_batch := device.dense_attention()) is not None:
            from runner.model import padded_attention

            install = partial(padded_attention.install_dense_attention, kernel=pad_batch, decide=decide)
            model.replace_dense_attention(install)
    if (
        isinstance(model, TransformersModel)
        and not model.is_padded
        and (kernel := device.varlen_attention(model.compute_dtype))
    ):
        model.set_varlen_kernel(kernel, decide=decide)
        if reason := merge_objection(device.torch_device):
            decide("shared prompts", "computed once", "keys repeated", reason)
    return model


def device_op_installer(device: Device, decide: Decisions, kernels: str | None = None) -> Callable[[nn.Module], None]:
    """What gives a transformers model on the device the device's own operators and attention."""

    def fit(module: nn.Module) -> None:
        device.apply_fused_ops(module, kernels)
        if (kernel := device.dense_attention()) is not None:
            from runner.model import padded_attention

            padded_attention.install_dense_attention(module, kernel, decide)

    return fit


def build_frozen_model(
    spec: JobSpec, role: str, policy: GenerativeModel, world: ParallelContext, decide: Decisions
) -> FrozenModel:
    """Build a model that is not trained: the reference or a teacher.

    A reference without a path is the policy with its adapter off, or a copy of what it starts from, in its data type,
    so that both say the same before the first step (of an adapter that it came with, the adapter alone). A teacher, or
    a reference with a path, is another model.
    """
    wanted = spec.algorithm.frozen_models()[role]
    if wanted.mode == "cached":
        from runner.build.precompute_reference import build_cached_reference

        return build_cached_reference(spec, policy, world, decide, cache_folder())
    from runner.trainer.reference_model import FrozenModel, frozen_copy_of_adapter

    continues = policy.weights_source.adapter is not None and not spec.adapter.trains_base
    way = wanted.mode or ("copy" if spec.adapter.trains_base or continues else "adapter")
    if continues and wanted.path is None:
        text = "the adapter that the model came with" if way == "copy" else "the base, without the adapter it came with"
        decide.record_fact(f"algorithm.{role}", way, f"{text}; to change it: algorithm.reference={_other(way)}")
    model: TrainableModel = policy
    during: Callable[[], AbstractContextManager[Any]] = nullcontext
    if wanted.path is not None:
        model = build_other_model(spec, role, wanted, policy.tokenizer, world, decide)
        _check_equal_layouts(model, policy, world, role)
    elif way == "adapter":
        during = policy.adapter_disabled
    elif continues and not spec.parallelism.deepspeed:
        during = frozen_copy_of_adapter(policy)
    else:
        model = build_model(spec, policy.tokenizer, world.device, decide, world=world, trains=False)
        model.module.requires_grad_(False)
    budget = spec.algorithm.micro_batch_budget
    options: dict[str, Any] = {"peers": world.peers, "stage": model.stage}
    return FrozenModel(model, budget=budget, device=world.device.torch_device, during=during, **options)


def _other(way: str) -> str:
    return "copy" if way == "adapter" else "adapter"


def _check_equal_layouts(model: TrainableModel, policy: GenerativeModel, world: ParallelContext, role: str) -> None:
    """Raise SpecError where ranks might wait forever, as another layout cuts micro-batches differently."""
    if world.mesh.dp_shard * world.mesh.ep > 1 and model.is_padded != policy.is_padded:
        text = f"algorithm.{role} uses the {model.layout} layout and the model the {policy.layout} one; sharded models"
        text = f"{text} (parallelism.dp_shard, parallelism.ep) need the same one; type padded"
        raise SpecError([Problem("model.batch_layout", text)])


def build_other_model(
    spec: JobSpec, role: str, wanted: FrozenModelSpec, tokenizer: Any, world: ParallelContext, decide: Decisions
) -> Any:
    """Another model than the job's, with the same tokenizer."""
    build = resolve("runner.model.teacher:build")
    key, seed = f"algorithm.{wanted.option or role}", derive_seed(spec.seed, role)
    options = {"tokenizer": tokenizer, "seed": seed, "decide": decide, "longest": longest_row(spec), "key": key}
    options |= {"dtype": wanted.dtype, "admit": world.check_divisible}

    make = partial(build, wanted.path, wanted.revision, spec.model, **options)
    return _place_model(lambda where, fit: make(device=where, fit=fit), world, world.device, decide, spec.model.kernels)


def longest_row(spec: JobSpec) -> int:
    """Tokens of the longest row that a model may meet; an item counts as 0 while data.max_length is null."""
    return (spec.data.max_length or 0) + spec.sampler.answer_tokens()


def build_store(spec: JobSpec, folder: RunFolder) -> CheckpointStore:
    """The run's checkpoints."""
    factory = default_registry().factory(spec.checkpoint)
    beside = (folder.metrics, folder.samples)
    store: CheckpointStore = factory(spec.checkpoint, root=folder.checkpoints, report=log.warning, beside=beside)
    return store


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a job.

    model: what the first learner, `main`, trains (the policy, where there is one); flops: of trained models
    """

    learners: Mapping[Role, LocalLearner]
    frozen: Mapping[Role, FrozenModel]
    model: TrainableModel
    flops: Mapping[Role, ModelFlops]

    @property
    def main(self) -> LocalLearner:
        """The first one that learns."""
        return next(iter(self.learners.values()))

    @property
    def by_role(self) -> dict[Role, Model]:
        """By role."""
        return {**self.learners, **self.frozen}


def build_models(spec: JobSpec, tokenizer: Any, world: ParallelContext, decide: Decisions) -> Models:
    """Build them: all that learn before the first learner, which may shard its own."""
    heads = spec.algorithm.trained_models()
    made = {role: build_model(spec, tokenizer, world.device, decide, head, world) for role, head in heads.items()}
    learners = {role: build_learner(spec, role, model, world, decide) for role, model in made.items()}
    model = next(iter(made.values()))
    frozen = {role: build_frozen_model(spec, role, model, world, decide) for role in spec.algorithm.frozen_models()}
    return Models(learners, frozen, model, {role: one.flops for role, one in made.items()})
