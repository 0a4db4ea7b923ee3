"""Runs the first steps of a job with module hooks, without trackers, checkpoints or evaluation.

    record    data, or sampler and reward ──▶ steps ──▶ Recording, with the experiences that were sampled
    compare   data, or the recording's experiences ──▶ the same steps ──▶ Recording

Dropout is off, because every device draws its own random numbers.

The module hooks record the first step:

    weight/ROLE/PARAMETER     as they are before the first step
    input/ROLE/MODULE         the first tensor that it takes  ┐ of the first micro-batch, in the order in which
    output/ROLE/MODULE        the first tensor that it gives  ┘ modules finish: a part before the whole
    output/ROLE/loss input N  what the loss is a function of: logprobs, values, …
    gradient/ROLE/PARAMETER   of the first optimizer step, before it is clipped

The head over the vocabulary is not watched: a hook would make it run in another way. Its output is in `logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from runner import __version__, build
from runner.build import BuiltJob
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.errors import TrainingDiverged
from runner.core.metrics import Metrics
from runner.core.signals import StopSignal
from runner.interfaces import LossFn, Model, Outputs, State
from runner.interfaces.learning import OptimSettings
from runner.run_dir.folder import RunFolder
from runner.run_dir.manifest import LIBRARIES
from runner.spec.job import JobSpec
from runner.tools.parity.recording import Recording, TensorSketch, first_tensor, sketch_tensor
from runner.trainer import loop
from runner.trainer.callbacks import LogStep
from runner.trainer.learner import LocalLearner
from runner.trainer.loop import ExperienceQueue, TrainingJob


class RecordingLearner(LocalLearner):
    """A learner that continues the given one, and fills `prints` during its first step.

    likelihood: Σ −logprobs of the tokens trained on in this step (of all where it learns none), and how many they were;
        where a loss needs logprobs
    """

    def __init__(self, learner: LocalLearner, role: str, prints: dict[str, TensorSketch]) -> None:
        vars(self).update(vars(learner))
        self.reads_late = False
        self._role, self._prints = role, prints
        model: Any = learner.model
        self._model = model
        self._scored = self._stepped = False
        self.likelihood = (0.0, 0)
        for name, parameter in model.module.named_parameters():
            prints[f"weight/{role}/{name}"] = sketch_tensor(parameter)

    def begin_step(self, step: int) -> None:
        """See `Learner`."""
        self.likelihood = (0.0, 0)
        super().begin_step(step)

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]:
        """See `Learner`."""
        with self._hook_modules():
            metrics, outputs = super().forward_backward(batch, loss, keep | loss.needs)
        if not self._scored:
            self._scored = True
            for name in sorted(loss.needs):
                self._prints[f"output/{self._role}/loss input {name}"] = sketch_tensor(outputs[name])
        if "logprobs" in outputs:
            self._count_likelihood(outputs["logprobs"], batch)
        return metrics, {name: outputs[name] for name in keep}

    def optim_step(self, settings: OptimSettings | None = None) -> Metrics:
        """See `Learner`."""
        if not self._stepped:
            self._stepped = True
            for name, parameter in self._model.trainable().items():
                if parameter.grad is not None:
                    self._prints[f"gradient/{self._role}/{name}"] = sketch_tensor(parameter.grad)
        return super().optim_step(settings)

    def _count_likelihood(self, logprobs: Tensor, batch: Batch) -> None:
        chosen = batch.tokens["weight"] != 0
        if not chosen.any():  # a step without contrast, which learns nothing
            chosen = batch.tokens["parent"] >= 0
        trained = logprobs.cpu().double()[chosen.cpu()]
        total, count = self.likelihood
        self.likelihood = (total - float(trained.sum()), count + len(trained))

    @contextmanager
    def _hook_modules(self) -> Iterator[None]:
        """Hooks on every module that runs by being called, for the first micro-batch of the first step."""
        if self._scored:
            yield
            return
        head = self._model.inner.get_output_embeddings()
        named = [(name, m) for name, m in self._model.module.named_modules() if name and m is not head]
        handles = [m.register_forward_hook(self._module_hook(name), with_kwargs=True) for name, m in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _module_hook(self, name: str) -> Any:
        place = f"{self._role}/{name}"

        @torch.no_grad()
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if f"output/{place}" in self._prints:  # another micro-batch, or activations that are computed again
                return
            taken, given = first_tensor((*args, *kwargs.values())), first_tensor(output)
            if taken is not None:
                self._prints[f"input/{place}"] = sketch_tensor(taken)
            if given is not None:
                self._prints[f"output/{place}"] = sketch_tensor(given)

        return hook


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
        decide.record_fact("dropout", "off", f"each device samples its own dropout; {role} has up to {rate:g}")
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

    return replace(job, feed=_feed(job, collect, steps), publish=lambda version: None)


def _feed(job: TrainingJob, collect: Callable[[int], Any], steps: int) -> ExperienceQueue[Any]:
    return ExperienceQueue(collect, steps, 0, encode=job.algorithm.encode, decode=job.algorithm.decode)
