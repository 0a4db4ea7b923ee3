"""From a job spec to a job: the only module that knows both the configs and what they configure.

    device → tokenizer → data → model → adapter → optimizer → learner → algorithm → evaluator, callbacks

Data comes before the model, so that a mistake in it is found before gigabytes are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.callback.evaluation import Evaluation
from runner.callback.record import Record
from runner.callback.saving import Saving
from runner.callback.stall import StallWatch
from runner.checkpoint.store import CheckpointStore
from runner.decisions import Decisions
from runner.errors import CheckpointError, DataError
from runner.evaluator import Evaluator
from runner.folder import RunFolder
from runner.learner import LocalLearner
from runner.loop import Job
from runner.protocols import Callback, Data, Device, State
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
    samples: Samples
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
        check_identity(self.identity, state["identity"])
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
    data: Data = factory(spec.data, tokenizer=tokenizer, seed=spec.seed, decide=decide, cache_dir=cache_folder())
    return data


def build_model(spec: JobSpec, tokenizer: Any, device: Device, decide: Decisions) -> Any:
    """The model with its adapter, on the device."""
    registry = default_registry()
    seed = derive(spec.seed, "weights")
    model = registry.factory(spec.model)(
        spec.model, tokenizer=tokenizer, device=device.torch_device, seed=seed, decide=decide
    )
    return registry.factory(spec.adapter)(spec.adapter, model, decide=decide)


def build_learner(spec: JobSpec, model: Any, device: Device, decide: Decisions) -> LocalLearner:
    """The learner over the model's trainable parameters."""
    registry = default_registry()
    if spec.schedule.warmup_steps >= spec.steps:
        reason = f"schedule.warmup_steps={spec.schedule.warmup_steps} and steps={spec.steps}"
        decide("schedule", spec.schedule.name, "warm-up only", reason)
    return LocalLearner(
        model,
        registry.factory(spec.optimizer)(spec.optimizer, parameters=model.trainable(), decide=decide),
        lr=spec.optimizer.lr,
        clip_norm=spec.optimizer.clip_norm,
        factor=registry.factory(spec.schedule)(spec.schedule, steps=spec.steps),
        budget=spec.algorithm.micro_batch_tokens,
        seed=spec.seed,
        device=device.torch_device,
    )


def build_store(spec: JobSpec, folder: RunFolder) -> CheckpointStore:
    """The run's checkpoints."""
    factory = default_registry().factory(spec.checkpoint)
    store: CheckpointStore = factory(spec.checkpoint, root=folder.checkpoints, report=log.warning)
    return store


def build(
    spec: JobSpec, folder: RunFolder, store: CheckpointStore, decide: Decisions, stop: StopSignal, outlets: Outlets
) -> Built:
    """Build everything that `spec` names."""
    registry = default_registry()
    device = build_device(spec, decide)
    tokenizer = build_tokenizer(spec)
    data = build_data(spec, tokenizer, decide)
    model = build_model(spec, tokenizer, device, decide)
    learner = build_learner(spec, model, device, decide)
    registry.factory(spec.sampler)(spec.sampler)
    algorithm = registry.factory(spec.algorithm)(spec.algorithm, data=data)
    callbacks: list[Callback] = [
        *_evaluation(spec, data, learner, model, outlets, decide),
        StallWatch(folder.root / "stacks.log", spec.watch.stall_s),
        Record(outlets.step),
    ]
    job = Job(
        steps=spec.steps,
        device=device,
        ranks=registry.factory(spec.parallelism)(spec.parallelism),
        algorithm=algorithm,
        learners={"policy": learner},
        models={"policy": learner},
        callbacks=callbacks,
        stop=stop,
    )
    sections = {"policy": learner, "algorithm": algorithm}
    built = Built(job, model, store, sections, _identity(spec, data, device))
    callbacks.append(Saving(built.save, every=spec.checkpoint.every))
    return built


def _evaluation(
    spec: JobSpec, data: Data, learner: LocalLearner, model: Any, outlets: Outlets, decide: Decisions
) -> list[Callback]:
    if spec.evaluation.every == 0:
        return []
    questions = data.held_out()
    if not questions:
        decide("evaluation", f"every {spec.evaluation.every} steps", "none", f"data={spec.data.name} holds nothing out")
        return []
    evaluator = Evaluator(questions, spec.evaluation.batch_size, spec.evaluation.max_new_tokens)
    return [
        Evaluation(
            lambda: evaluator.evaluate(learner, model),
            every=spec.evaluation.every,
            keep=spec.evaluation.samples,
            record=outlets.samples,
            say=outlets.say,
        )
    ]


def _identity(spec: JobSpec, data: Data, device: Device) -> dict[str, Any]:
    """What must be equal for a resume to be exact."""
    return {"data": data.fingerprint, "seed": spec.seed, "torch": torch.__version__, **device.describe()}


def check_identity(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse other data; say what else differs, because the curve then continues, but not bit for bit."""
    if now["data"] != saved["data"]:
        raise DataError(
            "the data (or its tokenizer) changed since the checkpoint was written; "
            "restore it, or start a new run from the export of this one"
        )
    differing = {k: (saved.get(k), v) for k, v in now.items() if saved.get(k) != v}
    if differing:
        log.warning(
            "resumed, but not bit for bit: %s", ", ".join(f"{k} was {a}, is {b}" for k, (a, b) in differing.items())
        )
