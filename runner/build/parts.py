"""The parts that every job has: device, tokenizer, data, models, learners, checkpoints."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

from runner.algorithm.base import Frozen
from runner.build.beforehand import build_cached
from runner.checkpoint.store import CheckpointStore
from runner.decisions import Decisions
from runner.errors import Problem, SpecError, UnfitModel
from runner.folder import RunFolder
from runner.frozen import FrozenModel
from runner.learner import LocalLearner
from runner.model.ragged import RaggedModel
from runner.paths import cache_folder
from runner.protocols import Data, Device
from runner.randomness import derive
from runner.registry import default_registry, resolve
from runner.spec.base import Head
from runner.spec.job import JobSpec

log = logging.getLogger("runner")


def build_device(spec: JobSpec, decide: Decisions) -> Device:
    """The device, ready to be used."""
    device: Device = default_registry().factory(spec.device)(spec.device, decide=decide)
    device.prepare()
    return device


def build_tokenizer(spec: JobSpec) -> Any:
    """The model's tokenizer, without the model."""
    return resolve(type(spec.model).tokenizer_factory)(spec.model)


def build_data(spec: JobSpec, tokenizer: Any, decide: Decisions) -> Data:
    """The data, read, checked and tokenised."""
    config = spec.data
    if spec.algorithm.learns_all and hasattr(config, "loss_on"):
        config = config.model_copy(update={"loss_on": "all"})
    data: Data = default_registry().factory(config)(
        config,
        tokenizer=tokenizer,
        seed=spec.seed,
        decide=decide,
        cache_dir=cache_folder(),
        kind=spec.algorithm.items,
    )
    return data


def build_model(spec: JobSpec, tokenizer: Any, device: Device, decide: Decisions, head: Head = "lm") -> Any:
    """The model with its adapter, on the device."""
    registry = default_registry()
    seed = derive(spec.seed, "weights")
    try:
        model = registry.factory(spec.model)(
            spec.model,
            tokenizer=tokenizer,
            device=device.torch_device,
            seed=seed,
            decide=decide,
            head=head,
            init_from=spec.init_from,
            longest=_longest(spec),
            fit=device.fuse,
        )
    except UnfitModel as error:
        raise SpecError([Problem(*spec.algorithm.instead(head, str(error)))]) from error
    _attend(model, device, decide)
    return registry.factory(spec.adapter)(spec.adapter, model, decide=decide)


def _attend(model: Any, device: Device, decide: Decisions) -> None:
    """Let packed rows attend by the device's kernel for rows end to end; an adapter around the model keeps it."""
    if isinstance(model, RaggedModel) and not model.padded and (kernel := device.attention(model.compute_type)):
        model.attend_with(kernel, decide=decide)


def build_learner(spec: JobSpec, role: str, model: Any, device: Device, decide: Decisions) -> LocalLearner:
    """The learner over the model's trainable parameters."""
    registry = default_registry()
    if spec.schedule.warmup_steps >= spec.steps:
        reason = f"schedule.warmup_steps={spec.schedule.warmup_steps} and steps={spec.steps}"
        decide("schedule", spec.schedule.name, "warm-up only", reason)
    _settle_dropout(spec, model, decide)
    return LocalLearner(
        model,
        registry.factory(spec.optimizer)(spec.optimizer, parameters=model.trainable(), decide=decide),
        lr=spec.algorithm.learning_rate(role, spec.optimizer.lr),
        clip_norm=spec.optimizer.clip_norm,
        factor=registry.factory(spec.schedule)(spec.schedule, steps=spec.steps),
        budget=spec.algorithm.micro_batch_tokens,
        seed=spec.seed,
        device=device.torch_device,
        prefix="train" if role == next(iter(spec.algorithm.learners())) else role,
    )


def _settle_dropout(spec: JobSpec, model: Any, decide: Decisions) -> None:
    """On or off, as the algorithm says. Raises SpecError where it was asked for and there is none."""
    if spec.algorithm.asks_for_dropout() and not model.dropout_rate():
        text = f"{type(model.inner).__name__} has no dropout to keep, and no adapter.dropout is set; leave it out"
        raise SpecError([Problem("algorithm.dropout", text)])
    if not spec.algorithm.drops_out() and (rate := model.without_dropout()):
        decide.state("algorithm.dropout", "off", f"{type(model.inner).__name__} has a dropout of up to {rate:g}")


def build_frozen(
    spec: JobSpec, role: str, wanted: Frozen, policy: Any, tokenizer: Any, device: Device, decide: Decisions
) -> FrozenModel:
    """The reference: the policy with its adapter off, or a copy of what it starts from, in its data type, so that both
    say the same before the first step; the teacher: another model."""
    if wanted.way == "cached":
        return build_cached(spec, policy, device, decide, cache_folder())
    way = wanted.way or ("copy" if spec.adapter.name == "none" else "adapter")
    model, during = policy, nullcontext
    if wanted.path is not None:
        model = build_teacher(spec, role, wanted, tokenizer, device, decide)
    elif way == "adapter":
        during = policy.module.disable_adapter
    else:
        model = build_model(spec, tokenizer, device, decide)
        model.module.requires_grad_(False)
    budget = spec.algorithm.micro_batch_tokens
    return FrozenModel(model, budget=budget, device=device.torch_device, during=during)


def build_teacher(spec: JobSpec, role: str, wanted: Frozen, tokenizer: Any, device: Device, decide: Decisions) -> Any:
    """Another model than the job's, with the same tokenizer; the option of its role's name says which."""
    teacher = resolve("runner.model.teacher:build")(
        wanted.path,
        wanted.revision,
        spec.model,
        tokenizer=tokenizer,
        device=device.torch_device,
        seed=derive(spec.seed, role),
        decide=decide,
        longest=_longest(spec),
        key=f"algorithm.{role}",
        dtype=wanted.dtype,
        fit=device.fuse,
    )
    _attend(teacher, device, decide)
    return teacher


def _longest(spec: JobSpec) -> int:
    """Tokens of the longest row that a model may meet."""
    return spec.data.max_length + spec.sampler.answer_tokens()


def build_store(spec: JobSpec, folder: RunFolder) -> CheckpointStore:
    """The run's checkpoints."""
    factory = default_registry().factory(spec.checkpoint)
    beside = (folder.metrics, folder.samples)
    store: CheckpointStore = factory(spec.checkpoint, root=folder.checkpoints, report=log.warning, beside=beside)
    return store
