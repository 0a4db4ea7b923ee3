"""Runs the first steps of a job with module hooks, without trackers, checkpoints or evaluation.

    record    data, or sampler and reward ──▶ steps ──▶ Recording, with the experiences that were sampled
    compare   data, or the recording's experiences ──▶ the same steps ──▶ Recording

Dropout is off, because every device draws its own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from runner import __version__, build
from runner.build import BuiltJob
from runner.core.auto_choices import Decisions
from runner.core.errors import TrainingDiverged
from runner.core.signals import StopSignal
from runner.interfaces import Model, State
from runner.run_dir.folder import RunFolder
from runner.run_dir.resume_compatibility import LIBRARIES
from runner.spec.job import JobSpec
from runner.tools.parity.module_hooks import RecordingLearner
from runner.tools.parity.recording import Recording, TensorSketch
from runner.trainer import loop
from runner.trainer.callbacks import LogStep
from runner.trainer.learner import LocalLearner
from runner.trainer.loop import ExperienceQueue, TrainingJob

KEPT_METRICS = ("train/loss", "train/grad_norm", "train/lr", "mismatch/logprob_diff")
LIKELIHOOD = "nll"  # mean negative log-likelihood of the tokens that a step learns


def run_recorded_steps(
    spec: JobSpec,
    folder: RunFolder,
    steps: int,
    given: Recording | None,
    accept: Callable[[Recording], None],
    decide: Decisions,
    say: Callable[[str], None],
) -> Recording:
    """Run the first `steps` steps; with `given`, on what it trained on.

    accept: sees what was built (no step yet) and may refuse it; with `given`, steps end where a number is not finite.
    """
    built = _build(spec, folder, decide, say)
    prints: dict[str, TensorSketch] = {}
    watched = {role: _wrap_learner(one, role, prints, decide) for role, one in built.job.learners.items()}
    main, numbers = next(iter(watched.values())), list[dict[str, float]]()

    def keep(step: int, values: Mapping[str, float]) -> None:
        total, count = main.likelihood
        own = {LIKELIHOOD: total / count} if count else {}
        numbers.append({name: values[name] for name in KEPT_METRICS if name in values} | own)

    made = _environment(built)
    job_spec = spec.model_dump(mode="json")
    accept(Recording(job_spec, made, (), prints))
    experiences: list[State] = []
    models: dict[str, Model] = {**built.job.models, **watched}
    job = replace(built.job, steps=steps, callbacks=[LogStep([keep])], learners=watched, models=models)
    job = _replaying_job(job, given, steps) if given and spec.algorithm.needs_sampler else job
    job = _recording_job(job, experiences, steps) if given is None and spec.algorithm.needs_sampler else job
    ended = None
    try:
        loop.run_loop(job, 0)
    except TrainingDiverged as error:
        if given is None:
            raise
        ended = str(error)
    return Recording(job_spec, made, numbers, prints, experiences, ended)


def _build(spec: JobSpec, folder: RunFolder, decide: Decisions, say: Callable[[str], None]) -> BuiltJob:
    quiet = {
        "evaluation": spec.evaluation.model_copy(update={"every": 0}),
        "checkpoint": spec.checkpoint.model_copy(update={"best": None}),
    }
    spec = spec.model_copy(update=quiet)
    return build.build(spec, folder, build.build_store(spec, folder), decide, StopSignal(), build.OutputSinks(say=say))


def _wrap_learner(learner: Any, role: str, prints: dict[str, TensorSketch], decide: Decisions) -> RecordingLearner:
    assert isinstance(learner, LocalLearner)
    model: Any = learner.model
    if rate := model.disable_dropout():
        decide.record_fact("dropout", "off", f"each device draws its own; {role} has a dropout of up to {rate:g}")
    return RecordingLearner(learner, role, prints)


def _environment(built: BuiltJob) -> dict[str, Any]:
    versions = {"runner": __version__} | {name: version(name) for name in LIBRARIES}
    with suppress(ModuleNotFoundError):  # only where there is an NPU, or what stands in for one
        versions["torch_npu"] = version("torch_npu")
    own, model = built.job.device, built.model
    device = {"name": own.name, "matmul_precision": own.matmul_precision(model.compute_dtype), **own.describe()}
    return {"device": device, "versions": versions, "data": built.data.fingerprint, "frozen": built.identity["frozen"]}


def _recording_job(job: TrainingJob, experiences: list[State], steps: int) -> TrainingJob:
    """The job, whose experiences are kept as they are taken."""
    inner = job.feed

    def collect(step: int) -> Any:
        experience = inner.take(step)
        experiences.append(job.algorithm.encode(experience))
        return experience

    def publish(version: int) -> None:
        job.publish(version)
        inner.start(0) if version == 0 else inner.on_weights_published(version - 1)

    def close() -> None:
        inner.__exit__(None, None, None)

    return replace(job, feed=_feed(job, collect, steps), publish=publish, closing=(*job.closing, close))


def _replaying_job(job: TrainingJob, given: Recording, steps: int) -> TrainingJob:
    """The job, which learns from what was recorded; nothing is sampled or scored."""

    def collect(step: int) -> Any:
        state = given.experiences[step]
        tensors = {name: torch.from_numpy(array) for name, array in state["tensors"].items()}
        return job.algorithm.decode({**state, "tensors": tensors})

    return replace(job, feed=_feed(job, collect, steps), publish=_publish_nothing)


def _feed(job: TrainingJob, collect: Callable[[int], Any], steps: int) -> ExperienceQueue[Any]:
    return ExperienceQueue(collect, steps, 0, encode=job.algorithm.encode, decode=job.algorithm.decode)


def _publish_nothing(version: int) -> None:
    """Nobody samples."""
