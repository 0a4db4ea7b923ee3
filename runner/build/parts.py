"""The parts that every job has: device, tokenizer, data, models, learners, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from runner.algorithm.base import Frozen
from runner.build.beforehand import build_cached
from runner.checkpoint.store import CheckpointStore
from runner.decisions import Decisions
from runner.errors import Problem, SpecError, UnfitModel
from runner.folder import RunFolder
from runner.frozen import FrozenModel
from runner.learner import LocalLearner
from runner.model import dense
from runner.model.build import DTYPES
from runner.model.ragged import RaggedModel
from runner.parallelism.world import World
from runner.paths import cache_folder
from runner.protocols import Data, Device, Peers
from runner.randomness import derive
from runner.registry import default_registry, resolve
from runner.spec.base import Head
from runner.spec.job import JobSpec

log = logging.getLogger("runner")


def build_device(spec: JobSpec, decide: Decisions) -> Device:
    """The device, ready to be used."""
    device: Device = default_registry().factory(spec.device)(spec.device, decide=decide)
    device.prepare()
    _refuse_types(spec, device)
    return device


def _refuse_types(spec: JobSpec, device: Device) -> None:
    """Raise SpecError for every data type that is asked for and that the device cannot compute with."""
    asked = {"model.dtype": spec.model.dtype, "model.autocast": spec.model.autocast}
    if spec.algorithm.rewarded and (reward := getattr(spec.reward, "dtype", None)):
        asked["reward.dtype"] = reward
    asked |= {f"algorithm.{role}_dtype": one.dtype for role, one in spec.algorithm.frozen().items() if one.dtype}
    instead = {"model.autocast": "none"}
    found = [
        Problem(key, f"{why}; type {key}={instead.get(key, 'float32')}")
        for key, name in asked.items()
        if (why := _lack(device, name))
    ]
    if found:
        raise SpecError(found)


def _lack(device: Device, name: str) -> str | None:
    return device.lacks(DTYPES[name]) if name in DTYPES else None  # autocast=none is no type


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


def build_model(
    spec: JobSpec, tokenizer: Any, device: Device, decide: Decisions, head: Head = "lm", world: World | None = None
) -> Any:
    """The model with its adapter, on the device; in pieces on the devices of `world`, where it says so."""
    registry = default_registry()
    seed = derive(spec.seed, "weights")
    pieces = world if world is not None and world.sharded else None
    try:
        model = registry.factory(spec.model)(
            spec.model,
            tokenizer=tokenizer,
            device=device.torch_device if pieces is None else torch.device("cpu"),
            seed=seed,
            decide=decide,
            head=head,
            init_from=spec.init_from,
            longest=_longest(spec),
            fit=fitting(device, decide) if pieces is None else None,
            admit=None if world is None else world.admit,
        )
    except UnfitModel as error:
        raise SpecError([Problem(*spec.algorithm.instead(head, str(error)))]) from error
    if pieces is None:
        _attend(model, device, decide)
    adapted = registry.factory(spec.adapter)(spec.adapter, model, decide=decide)
    if world is not None:
        world.refuse_different(adapted)
    if pieces is not None:
        _in_pieces(adapted, pieces, device, decide)
    return adapted


def _in_pieces(model: Any, world: World, device: Device, decide: Decisions) -> None:
    """Bring a model that was built on the CPU to the devices of `world`, with what they have of their own."""
    world.shard(model, decide)
    if (kernel := device.dense_attention()) is not None:
        model.attend_anew(partial(dense.attend, kernel=kernel, decide=decide))
    _attend(model, device, decide)


def fitting(device: Device, decide: Decisions) -> Callable[[nn.Module], None]:
    """What gives a transformers model on the device the device's own operators and attention."""

    def fit(module: nn.Module) -> None:
        device.fuse(module)
        if (kernel := device.dense_attention()) is not None:
            dense.attend(module, kernel, decide)

    return fit


def _attend(model: Any, device: Device, decide: Decisions) -> None:
    """Let packed rows attend by the device's kernel for rows end to end; an adapter around the model keeps it."""
    if isinstance(model, RaggedModel) and not model.padded and (kernel := device.attention(model.compute_type)):
        model.attend_with(kernel, decide=decide)


def build_learner(
    spec: JobSpec, role: str, model: Any, device: Device, world: World, decide: Decisions
) -> LocalLearner:
    """The learner over the model's trainable parameters."""
    registry = default_registry()
    if spec.schedule.warmup_steps >= spec.steps:
        reason = f"schedule.warmup_steps={spec.schedule.warmup_steps} and steps={spec.steps}"
        decide("schedule", spec.schedule.name, "warm-up only", reason)
    _settle_dropout(spec, model, world.peers, decide)
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
        peers=world.peers,
        copies=world.copies,
    )


def _settle_dropout(spec: JobSpec, model: Any, peers: Peers, decide: Decisions) -> None:
    """On or off, as the algorithm says. Raises SpecError where it was asked for and there is none."""
    if spec.algorithm.asks_for_dropout() and not model.dropout_rate():
        text = f"{type(model.inner).__name__} has no dropout to keep, and no adapter.dropout is set; leave it out"
        raise SpecError([Problem("algorithm.dropout", text)])
    if not spec.algorithm.drops_out() and (rate := model.without_dropout()):
        decide.state("algorithm.dropout", "off", f"{type(model.inner).__name__} has a dropout of up to {rate:g}")
    if peers.size > 1 and (rate := model.dropout_rate()):
        text = f"each of {peers.size} ranks draws for itself, so that another number of them learns otherwise"
        decide.state("algorithm.dropout", f"up to {rate:g}", text)


def build_frozen(
    spec: JobSpec,
    role: str,
    wanted: Frozen,
    policy: Any,
    tokenizer: Any,
    device: Device,
    world: World,
    decide: Decisions,
) -> FrozenModel:
    """The reference: the policy with its adapter off, or a copy of what it starts from, in its data type, so that both
    say the same before the first step; the teacher: another model."""
    if wanted.way == "cached":
        return build_cached(spec, policy, device, world.peers, world.everyone, decide, cache_folder())
    way = wanted.way or ("copy" if spec.adapter.name == "none" else "adapter")
    model, during = policy, nullcontext
    if wanted.path is not None:
        model = build_teacher(spec, role, wanted, tokenizer, device, world, decide)
        _refuse_unlike_passes(model, policy, world, role)
    elif way == "adapter":
        during = policy.module.disable_adapter
    else:
        model = build_model(spec, tokenizer, device, decide, world=world)
        model.module.requires_grad_(False)
    budget = spec.algorithm.micro_batch_tokens
    return FrozenModel(model, budget=budget, device=device.torch_device, during=during, peers=world.peers)


def _refuse_unlike_passes(model: Any, policy: Any, world: World, role: str) -> None:
    """Raise SpecError where ranks might wait for one another for ever: each runs as many passes as the others, in
    micro-batches of the policy, which another layout may have to cut again."""
    if world.mesh.dp_shard > 1 and model.padded != policy.padded:
        text = f"algorithm.{role} takes {model.layout} rows and the model {policy.layout} ones, which in pieces"
        raise SpecError([Problem("model.layout", f"{text} (parallelism.dp_shard) has to be the same; type padded")])


def build_teacher(
    spec: JobSpec, role: str, wanted: Frozen, tokenizer: Any, device: Device, world: World, decide: Decisions
) -> Any:
    """Another model than the job's, with the same tokenizer; the option of its role's name says which."""
    teacher = resolve("runner.model.teacher:build")(
        wanted.path,
        wanted.revision,
        spec.model,
        tokenizer=tokenizer,
        device=torch.device("cpu") if world.sharded else device.torch_device,
        seed=derive(spec.seed, role),
        decide=decide,
        longest=_longest(spec),
        key=f"algorithm.{role}",
        dtype=wanted.dtype,
        fit=None if world.sharded else fitting(device, decide),
        admit=world.admit,
    )
    world.refuse_different(teacher)
    if world.sharded:
        _in_pieces(teacher, world, device, decide)
    else:
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
