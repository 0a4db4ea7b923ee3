"""The parts that every job has: device, tokenizer, data, models, learners, checkpoints."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from runner.algorithm.base import Frozen, Head
from runner.checkpoint.store import CheckpointStore
from runner.decisions import Decisions
from runner.folder import RunFolder
from runner.frozen import FrozenModel
from runner.learner import LocalLearner
from runner.protocols import Data, Device
from runner.randomness import derive
from runner.registry import default_registry, resolve
from runner.spec.job import JobSpec

log = logging.getLogger("runner")


def cache_folder() -> Path:
    """Where tokenised data is kept between runs: $RUNNER_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("RUNNER_CACHE") or Path(base) / "runner")


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
    model = registry.factory(spec.model)(
        spec.model,
        tokenizer=tokenizer,
        device=device.torch_device,
        seed=seed,
        decide=decide,
        head=head,
        init_from=spec.init_from,
        longest=spec.data.max_length + spec.sampler.answer_tokens(),
    )
    return registry.factory(spec.adapter)(spec.adapter, model, decide=decide)


def build_learner(spec: JobSpec, role: str, model: Any, device: Device, decide: Decisions) -> LocalLearner:
    """The learner over the model's trainable parameters."""
    registry = default_registry()
    if spec.schedule.warmup_steps >= spec.steps:
        reason = f"schedule.warmup_steps={spec.schedule.warmup_steps} and steps={spec.steps}"
        decide("schedule", spec.schedule.name, "warm-up only", reason)
    return LocalLearner(
        model,
        registry.factory(spec.optimizer)(spec.optimizer, parameters=model.trainable(), decide=decide),
        lr=spec.algorithm.learning_rate(role, spec.optimizer.lr),
        clip_norm=spec.optimizer.clip_norm,
        factor=registry.factory(spec.schedule)(spec.schedule, steps=spec.steps),
        budget=spec.algorithm.micro_batch_tokens,
        seed=spec.seed,
        device=device.torch_device,
        prefix="critic" if role == "critic" else "train",
    )


def build_frozen(
    spec: JobSpec, wanted: Frozen, policy: Any, tokenizer: Any, device: Device, decide: Decisions
) -> FrozenModel:
    """The reference: the policy with its adapter off, or a copy of what it starts from."""
    way = wanted.way or ("copy" if spec.adapter.name == "none" else "adapter")
    model, during = policy, nullcontext
    if way == "adapter":
        during = policy.module.disable_adapter
    else:
        model = build_model(spec, tokenizer, device, decide)
        model.module.requires_grad_(False)
    budget = spec.algorithm.micro_batch_tokens
    return FrozenModel(model, budget=budget, device=device.torch_device, during=during)


def build_store(spec: JobSpec, folder: RunFolder) -> CheckpointStore:
    """The run's checkpoints."""
    factory = default_registry().factory(spec.checkpoint)
    beside = (folder.metrics, folder.samples)
    store: CheckpointStore = factory(spec.checkpoint, root=folder.checkpoints, report=log.warning, beside=beside)
    return store
