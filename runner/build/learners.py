"""The learner of a job's model: its optimizer, learning rate and dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from runner.build.result_check import build_component
from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError
from runner.interfaces import TrainableModel
from runner.optimizer.config import OptimizerConfig
from runner.parallelism.parallel_context import ParallelContext
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.trainer.learner import LocalLearner


def build_learner(
    spec: JobSpec, role: str, model: TrainableModel, world: ParallelContext, decide: Decisions
) -> LocalLearner:
    """The learner over the model's trainable parameters."""
    if spec.schedule.warmup_steps >= spec.steps:
        reason = f"schedule.warmup_steps={spec.schedule.warmup_steps} and steps={spec.steps}"
        decide("schedule", spec.schedule.name, "warm-up only", reason)
    _configure_dropout(spec, model, world.replica_peers.size * model.stage.num_stages, decide)
    config = _with_learning_rate(spec, decide)
    optimizer = build_component(config, parameters=model.trainable(), decide=decide)
    make: Callable[..., LocalLearner] = LocalLearner
    if spec.parallelism.deepspeed:
        from runner.parallelism.deepspeed_zero import DeepSpeedZero
        from runner.trainer.deepspeed_learner import DeepSpeedLearner

        make = partial(DeepSpeedLearner, zero=DeepSpeedZero(model, optimizer, world, spec.optimizer.clip_norm, decide))
    return make(
        model,
        optimizer,
        lr=spec.algorithm.learning_rate(role, config.learning_rate),
        clip_norm=spec.optimizer.clip_norm,
        factor=default_registry().factory(spec.schedule)(spec.schedule, steps=spec.steps),
        budget=spec.algorithm.micro_batch_budget,
        seed=spec.seed,
        device=world.device.torch_device,
        prefix="train" if role == next(iter(spec.algorithm.trained_models())) else role,
        peers=world.peers,
        gradients=world.gradient_reducer(model),
        stage=model.stage,
        drawing=world.replica_peers,
    )


def _with_learning_rate(spec: JobSpec, decide: Decisions) -> OptimizerConfig:
    """The optimizer's config, with the learning rate of the adapter where none was given."""
    lr, given = spec.adapter.default_lr, spec.optimizer.lr is not None
    if not given:
        decide.record_fact("optimizer.lr", f"{lr:g}", f"the default with adapter={spec.adapter.component_name()}")
    return spec.optimizer if given else spec.optimizer.model_copy(update={"lr": lr})


def _configure_dropout(spec: JobSpec, model: TrainableModel, streams: int, decide: Decisions) -> None:
    """On or off, as the algorithm says; streams: number of ranks that draw differently.

    Raises SpecError where it was requested and there is none.
    """
    if spec.algorithm.is_dropout_requested() and not model.dropout_rate():
        text = f"{type(model.inner).__name__} has no dropout, and adapter.dropout is not set; leave it out"
        raise SpecError([Problem("algorithm.dropout", text)])
    if not spec.algorithm.is_dropout_enabled() and (rate := model.disable_dropout()):
        decide.record_fact("algorithm.dropout", "off", f"{type(model.inner).__name__} has a dropout of up to {rate:g}")
    if streams > 1 and (rate := model.dropout_rate()):
        text = f"each of {streams} ranks has its own random stream, so results depend on the number of ranks"
        decide.record_fact("algorithm.dropout", f"up to {rate:g}", text)
