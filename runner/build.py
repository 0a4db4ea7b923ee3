"""From a job spec to a job: the only module that knows both the configs and what they configure.

    device → tokenizer → data → models → adapters → optimizers → learners → sampler, reward → algorithm → callbacks

Data comes before the model, so that a mistake in it is found before gigabytes are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runner.algorithm.base import Head
from runner.algorithm.parts import Parts
from runner.callback.evaluation import Evaluation
from runner.callback.record import Record
from runner.callback.rollouts import Rollouts
from runner.callback.saving import Saving
from runner.callback.stall import StallWatch
from runner.checkpoint.store import CheckpointStore
from runner.decisions import Decisions
from runner.errors import CheckpointError
from runner.evaluator import Evaluator, Report, askable
from runner.feed import Feed
from runner.folder import RunFolder
from runner.frozen import FrozenModel
from runner.held_out_loss import HeldOutLoss, LearnsFromItems
from runner.identity import identity, refuse_changed
from runner.learner import LocalLearner
from runner.loop import Job
from runner.protocols import Algorithm, Callback, Data, Device, Model, Ranks, Reward, Sampler, State
from runner.publisher import Publisher
from runner.randomness import derive
from runner.registry import default_registry, resolve
from runner.signals import StopSignal
from runner.spec.job import JobSpec

log = logging.getLogger("runner")

Samples = Callable[[int, Sequence[Mapping[str, Any]]], None]


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where numbers, samples and words go: given by whoever launches."""

    step: Sequence[Callable[[int, Mapping[str, float]], None]]
    samples: Samples  # of an evaluation, which are shown too
    rollouts: Samples  # of a step
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A job, and what its launcher needs beside it."""

    job: Job
    model: Any
    store: CheckpointStore
    sections: Mapping[str, Any]
    identity: Mapping[str, Any]

    def save(self, step: int, values: Mapping[str, float]) -> Path:
        """Write a checkpoint of every section's state."""
        state: dict[str, State] = {name: part.state_dict() for name, part in self.sections.items()}
        return self.store.save(step, {**state, "identity": dict(self.identity)}, values)

    def restore(self, state: Mapping[str, State]) -> None:
        """Load every section. Raises DataError if the data changed, CheckpointError if the model did."""
        refuse_changed(self.identity, state["identity"])
        for name, part in self.sections.items():
            if name not in state:
                raise CheckpointError(f"the checkpoint has no section {name!r}; it is of another version of this job")
            part.load_state_dict(state[name])


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
    factory = default_registry().factory(spec.data)
    data: Data = factory(
        spec.data,
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


def _build_frozen(spec: JobSpec, policy: Any, tokenizer: Any, device: Device, decide: Decisions) -> FrozenModel:
    """The reference: the policy with its adapter off, or a copy of what it starts from."""
    wanted = spec.algorithm.reference_kind() or ("copy" if spec.adapter.name == "none" else "adapter")
    model, during = policy, nullcontext
    if wanted == "adapter":
        during = policy.module.disable_adapter
    else:
        model = build_model(spec, tokenizer, device, decide)
        model.module.requires_grad_(False)
    budget = spec.algorithm.micro_batch_tokens
    return FrozenModel(model, budget=budget, device=device.torch_device, during=during)


def _build_sampler(spec: JobSpec, policy: Any, tokenizer: Any, device: Device, decide: Decisions) -> Sampler | None:
    """The sampler: over the policy itself at lag 0, over a copy where sampling runs ahead of training."""
    if not spec.algorithm.samples:
        return None
    model = policy if spec.algorithm.steps_ahead() == 0 else build_model(spec, tokenizer, device, decide)
    sampler: Sampler = default_registry().factory(spec.sampler)(spec.sampler, model=model, decide=decide)
    return sampler


def _build_reward(spec: JobSpec, tokenizer: Any, device: Device, decide: Decisions, folder: RunFolder) -> Reward | None:
    """The reward; user code keeps its log in the run's folder."""
    if not spec.algorithm.samples:
        return None
    reward: Reward = default_registry().factory(spec.reward)(
        spec.reward, device=device.torch_device, tokenizer=tokenizer, seed=spec.seed, decide=decide, folder=folder.root
    )
    return reward


def build_store(spec: JobSpec, folder: RunFolder) -> CheckpointStore:
    """The run's checkpoints."""
    factory = default_registry().factory(spec.checkpoint)
    beside = (folder.metrics, folder.samples)
    store: CheckpointStore = factory(spec.checkpoint, root=folder.checkpoints, report=log.warning, beside=beside)
    return store


def build(
    spec: JobSpec, folder: RunFolder, store: CheckpointStore, decide: Decisions, stop: StopSignal, outlets: Outlets
) -> Built:
    """Build everything that `spec` names."""
    registry = default_registry()
    device = build_device(spec, decide)
    tokenizer = build_tokenizer(spec)
    data = build_data(spec, tokenizer, decide)
    made = {
        role: build_model(spec, tokenizer, device, decide, head) for role, head in spec.algorithm.learners().items()
    }
    learners = {role: build_learner(spec, role, model, device, decide) for role, model in made.items()}
    main, model = next(iter(made.items()))
    frozen = {role: _build_frozen(spec, model, tokenizer, device, decide) for role in spec.algorithm.frozen()}
    reward = _build_reward(spec, tokenizer, device, decide, folder)
    sampler = _build_sampler(spec, model, tokenizer, device, decide)
    environments = registry.factory(spec.environment)(spec.environment, decide=decide)
    algorithm = registry.factory(spec.algorithm)(
        spec.algorithm, Parts(data, tokenizer, spec.seed, decide, sampler, reward, environments)
    )
    publisher = None if sampler is None else Publisher(learners[main].weights, sampler, algorithm.lag)
    models: dict[str, Model] = {**learners, **frozen}
    ranks = registry.factory(spec.parallelism)(spec.parallelism)
    evaluate = _evaluator(spec, data, learners[main], model, algorithm, models, ranks, decide)
    callbacks: list[Callback] = [
        *([] if evaluate is None else [_evaluation(spec, evaluate, outlets)]),
        StallWatch(folder.stacks, spec.watch.stall_s),
        Record(outlets.step),
        Rollouts(outlets.rollouts, spec.watch.samples),
    ]
    feed = Feed(
        partial(_collect, algorithm, publisher),
        spec.steps,
        algorithm.lag,
        encode=algorithm.encode,
        decode=algorithm.decode,
    )
    job = Job(
        steps=spec.steps,
        device=device,
        ranks=ranks,
        algorithm=algorithm,
        feed=feed,
        publish=_publish_nothing if publisher is None else publisher.publish,
        learners=learners,
        models=models,
        callbacks=callbacks,
        stop=stop,
        closing=() if reward is None else (reward.close,),
    )
    sections = {**learners, "algorithm": algorithm, "feed": feed}
    own = identity(spec, data.fingerprint, data.style, model.origin, device.describe())
    built = Built(job, model, store, sections, own)
    callbacks.append(Saving(built.save, every=spec.checkpoint.every))
    return built


def _collect(algorithm: Algorithm, publisher: Publisher | None, step: int) -> Any:
    """Collect a step's experience, sampled with the weights that are due to it."""
    if publisher is not None:
        publisher.load_for(step)
    return algorithm.collect(step)


def _publish_nothing(version: int) -> None:
    """Nobody samples."""


def _evaluator(
    spec: JobSpec,
    data: Data,
    learner: LocalLearner,
    model: Any,
    algorithm: Algorithm,
    models: Mapping[str, Model],
    ranks: Ranks,
    decide: Decisions,
) -> Callable[[], Report] | None:
    """What evaluates: greedy answers to held-out questions, the algorithm's loss on held-out items, or both."""
    if spec.evaluation.every == 0:
        return None
    found: list[Callable[[], Report]] = []
    questions, items = data.held_out(), data.held_out_items()
    if questions and hasattr(model, "generate"):
        limit = spec.evaluation.max_new_tokens
        asked = askable(questions, model.tokenizer, limit, decide)
        ask = Evaluator(questions, asked, spec.evaluation.batch_size, limit)
        found.append(lambda: ask.evaluate(learner, model))
    if items and isinstance(algorithm, LearnsFromItems):
        wanted = spec.evaluation
        held_out = HeldOutLoss(algorithm, items, spec.algorithm.batch_size, wanted.samples, model.tokenizer, ranks)
        found.append(lambda: held_out.evaluate(models))
    if not found:
        decide("evaluation", f"every {spec.evaluation.every} steps", "none", f"data={spec.data.name} holds nothing out")
        return None
    return partial(_together, found)


def _together(evaluations: Sequence[Callable[[], Report]]) -> Report:
    """Several evaluations as one; later numbers win over earlier ones of the same name."""
    reports = [evaluate() for evaluate in evaluations]
    return Report(
        {name: value for report in reports for name, value in report.values.items()},
        [sample for report in reports for sample in report.samples],
    )


def _evaluation(spec: JobSpec, evaluate: Callable[[], Report], outlets: Outlets) -> Evaluation:
    wanted = spec.evaluation
    return Evaluation(evaluate, every=wanted.every, keep=wanted.samples, record=outlets.samples, say=outlets.say)
