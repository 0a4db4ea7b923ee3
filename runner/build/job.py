"""A job, built from its spec, and the checks that all ranks begin with the same.

    device → tokenizer → data → models → adapters → optimizers → learners → sampler, reward → algorithm → callbacks

What samples, what evaluates and what computes a reference beforehand is imported where the job has it.
Data comes before the model, so that a mistake in it is found before gigabytes are read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from runner.algorithm.sft import PackedAlgorithm
from runner.build.components import (
    Models,
    build_device,
    build_models,
    build_tokenizer,
    compare_tokenizers,
)
from runner.build.data import build_data, check_images, resolve_max_length
from runner.build.environments import EnvironmentBuilder, build_extend
from runner.build.micro_batch import resolve_micro_batch
from runner.build.plug_ins import plug_in_digests
from runner.build.rewards import EvaluationRewards, RewardBuilder, refuse_missing_columns, reward_origins
from runner.build.router_replay import hook_routers
from runner.checkpoint.store import CheckpointStore
from runner.core.auto_choices import Decisions
from runner.core.errors import CheckpointError, DataError, Problem, SpecError
from runner.core.rank_info import RankInfo
from runner.core.signals import StopSignal
from runner.device.base import peak_flops
from runner.distributed.work_partition import run_on_rank0
from runner.interfaces import (
    Algorithm,
    Callback,
    Data,
    GenerativeModel,
    RankCollectives,
    Sampler,
    State,
    TrainableModel,
)
from runner.interfaces.learning import AlgorithmInputs
from runner.parallelism.parallel_context import ParallelContext
from runner.run_dir.folder import RunFolder
from runner.run_dir.manifest import check_compatible, run_identity
from runner.run_dir.user_files import with_copied_files
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.spec.saved_spec import is_older
from runner.trainer.callbacks import (
    DeviceStats,
    HangWatch,
    LogRollouts,
    LogStep,
    RunEvaluation,
    SaveCheckpoints,
    ZeroVarianceWarning,
)
from runner.trainer.loop import ExperienceQueue, ReadAheadQueue, TrainingJob

if TYPE_CHECKING:
    from runner.trainer.evaluator import Report
    from runner.weight_sync.publisher import Publisher


def refuse_different_data(data: Data, everyone: RankCollectives) -> None:
    """Raise DataError, on all ranks, where one has read other rows or has another tokenizer."""
    ranks = everyone.all_gather(data.fingerprint)
    if others := [rank for rank, found in enumerate(ranks) if found != ranks[0]]:
        raise DataError(
            f"{_rank_words(others)} other data than rank 0, or other tokens\n"
            "  use the same files, tokenizer and library versions on all machines"
        )


def refuse_different_steps(first: int, everyone: RankCollectives) -> None:
    """Raise CheckpointError, on all ranks, where they would not continue from the same checkpoint."""
    ranks = everyone.all_gather(first)
    if len(set(ranks)) > 1:
        raise CheckpointError(
            f"ranks find different newest checkpoints: of steps {', '.join(map(str, ranks))}\n"
            "  use one run folder on all machines, and fix unreadable files: see run.log and ranks/*.log"
        )


def _rank_words(ranks: list[int]) -> str:
    """rank 3 has, ranks 2, 3 have"""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'have' if len(ranks) > 1 else 'has'}"


log = logging.getLogger("runner")

SINGLE_RANK = RankInfo()
Samples = Callable[[int, Sequence[Mapping[str, Any]]], None]


def _discard(*given: object) -> None:
    """Do nothing."""


class Closeable(Protocol):
    """A part with threads, files or processes to end."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OutputSinks:
    """Where numbers, samples and words go: given by whoever launches."""

    step: Sequence[Callable[[int, Mapping[str, float]], None]] = ()
    log_first: Callable[[int, Mapping[str, float]], None] = _discard  # the evaluation before the first step
    samples: Samples = _discard  # of an evaluation, which are shown too
    rollouts: Samples = _discard  # of a step
    say: Callable[[str], None] = _discard


@dataclass(frozen=True, slots=True)
class BuiltJob:
    """A job, and what its launcher needs beside it."""

    job: TrainingJob
    model: TrainableModel
    store: CheckpointStore
    sections: Mapping[str, Any]
    identity: Mapping[str, Any]
    data: Data
    world: ParallelContext
    spec: JobSpec  # with the steps that `epochs` came to
    callbacks: Mapping[str, Callback] = field(default_factory=dict)  # of plug-ins, by the names of their sections

    def save(self, step: int, values: Mapping[str, float]) -> Path:
        """Write a checkpoint of every section's state; all ranks do, each what it holds."""
        return self.store.save(step, self.state(), values)

    def start_saving(self, step: int, values: Mapping[str, float]) -> None:
        """The same while training continues; what goes wrong is raised by `store.check`."""
        self.store.start(step, self.state(), values)

    def state(self) -> dict[str, State]:
        """Every section's state, and the identity of the run."""
        parts = {**self.sections, **self.callbacks}
        state: dict[str, State] = {name: part.state_dict() for name, part in parts.items()}
        return {**state, "identity": dict(self.identity)}

    def restore(self, state: Mapping[str, State]) -> None:
        """Load every section. Raises DataError if the data changed, CheckpointError if the model did."""
        check_compatible(self.identity, state["identity"])
        if is_older(state["identity"]) and state["feed"]["steps"]:
            raise CheckpointError(
                "an older version collected experience ahead (algorithm.lag), which this version cannot read\n"
                "  start a new run from its weights: init_from=RUN"
            )
        for name, part in self.sections.items():
            if name not in state:
                raise CheckpointError(f"the checkpoint has no section {name!r}; another version of this job wrote it")
            part.load_state_dict(state[name])
        for name, callback in self.callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])
            else:
                log.warning("%s starts without state: the checkpoint has none for it", name)


def build(
    spec: JobSpec,
    folder: RunFolder,
    store: CheckpointStore,
    decide: Decisions,
    stop: StopSignal,
    outlets: OutputSinks,
    place: RankInfo = SINGLE_RANK,
) -> BuiltJob:
    """Build everything that `spec` names, on the rank at `place`; all ranks do, in step with one another.

    The user's files are read from their copies in the folder, if it has them.
    """
    device = build_device(spec, decide)
    world: ParallelContext = default_registry().factory(spec.parallelism)(spec.parallelism, device=device, place=place)
    copied = with_copied_files(spec, folder)
    compare_tokenizers(copied, tokenizer := build_tokenizer(copied, decide), decide)
    data = _data(copied, tokenizer, world, decide)
    given = resolve_epochs(spec, len(data), decide)
    spec = resolve_micro_batch(resolve_max_length(given, data, decide), device, world.world_peers, decide)
    spec = with_copied_files(spec, folder)
    builder = EnvironmentBuilder(tokenizer, decide, folder.root)
    environments = builder.build(spec, world.rollout_peers, folder.journal)
    extend = build_extend(spec, tokenizer, environments, decide)
    rewards = RewardBuilder(tokenizer, world, decide, folder)
    build_reward = partial(rewards.build_for_training, spec, data)
    reward = None if spec.reward.runs_model else build_reward()  # tried before the model is loaded
    models = build_models(spec, tokenizer, world, decide)
    hook_routers(spec, model := models.model, decide)
    reward = build_reward() if spec.reward.runs_model else reward
    sampler = _sampler(spec, model, world, decide, folder, store)
    parts = AlgorithmInputs(data, tokenizer, spec.seed, decide, sampler, reward, environments, models.frozen, extend)
    algorithm = default_registry().factory(spec.algorithm)(spec.algorithm, parts)
    _precompute_references(spec, models, algorithm, data, decide, outlets.say)
    publisher = _publisher(spec, folder, sampler, models, world)
    judges = EvaluationRewards(spec, rewards, reward)
    here = (environments and environments.for_evaluation(world.world_peers), decide, extend, judges.build, builder)
    evaluate = _build_evaluation(spec, data, models, algorithm, world, here)
    activity = DeviceStats(device.stats_readers(), spec.watch.device_stats_interval_s)
    own = _plugin_callbacks(spec, folder, model, outlets, place, decide)
    callbacks = _callbacks(spec, folder, evaluate, activity, publisher, outlets, decide, own.values())
    job = TrainingJob(
        steps=spec.steps,
        device=device,
        peers=world.world_peers,
        algorithm=algorithm,
        feed=_experience_queue(spec, algorithm, publisher, device.torch_device, models),
        publish=_discard if publisher is None else publisher.publish,
        learners=models.learners,
        models=models.by_role,
        callbacks=callbacks,
        stop=stop,
        flops={role: one.batch_flops for role, one in models.flops.items()},
        peak_flops=peak_flops(device, model.compute_dtype, decide).flops,
        closing=_closing(callbacks, (activity, store, judges, reward, builder, publisher, sampler)),
    )
    sections = {**job.learners, "algorithm": job.algorithm, "feed": job.feed}
    built = BuiltJob(job, model, store, sections, _identity(given, spec, data, models, world), data, world, given, own)
    callbacks.append(_checkpoint_callback(spec, built, decide))
    return built


def _sampler(spec: JobSpec, model: TrainableModel, *given: Any) -> Sampler | None:
    """The sampler (see `build_sampler`); None for an algorithm that samples nothing."""
    if not spec.algorithm.needs_sampler:
        return None
    from runner.build.samplers import build_sampler

    return build_sampler(spec, cast(GenerativeModel, model), *given)


def _publisher(
    spec: JobSpec, folder: RunFolder, sampler: Sampler | None, models: Models, world: ParallelContext
) -> Publisher | None:
    """What sends weights to the sampler, if there is one."""
    if sampler is None:
        return None
    from runner.build.samplers import build_publisher

    return build_publisher(spec, folder, sampler, models.main, cast(GenerativeModel, models.model), world)


def _closing(callbacks: Iterable[Callback], parts: Iterable[Closeable | None]) -> tuple[Callable[[], None], ...]:
    """What ends the parts; the watch for hangs is closed last, as closing the others may hang, too."""
    watches = (one.close for one in callbacks if isinstance(one, HangWatch))
    return (*watches, *(part.close for part in parts if part is not None))


def _data(spec: JobSpec, tokenizer: Any, world: ParallelContext, decide: Decisions) -> Data:
    """The data, of which all ranks have the same."""
    data = build_data(spec, tokenizer, decide)
    refuse_different_data(data, world.world_peers)
    refuse_missing_columns(spec, data)
    check_images(spec, tokenizer)
    if (per_step := spec.algorithm.batch_size) > len(data):
        text = "algorithm.batch_size=%d is above the %d items of the data: one step uses some items more than once"
        log.warning(text + "; to use each at most once a step: algorithm.batch_size=%d", per_step, len(data), len(data))
    return data


def _build_evaluation(
    spec: JobSpec, data: Data, models: Models, algorithm: Algorithm, world: ParallelContext, here: tuple[Any, ...]
) -> Callable[[int], Report] | None:
    """What evaluates, in the thread that trains; None where nothing does.

    here: the further arguments of `build_evaluation`
    """
    if not spec.evaluation.every:
        return None
    from runner.build.evaluation import build_evaluation

    return build_evaluation(spec, data, models, algorithm, world, *here)


def resolve_epochs(spec: JobSpec, items: int, decide: Decisions) -> JobSpec:
    """The spec with the steps of `epochs` passes over `items` items, rounded up, and without `epochs`.

    Raises SpecError where the schedule does not fit these steps.
    """
    if spec.epochs is None:
        return spec
    per_step = spec.algorithm.batch_size
    steps = math.ceil(spec.epochs * items / per_step)
    resolved = spec.model_copy(update={"steps": steps, "epochs": None})
    if problems := resolved.schedule.problems(resolved):
        raise SpecError([Problem(key, text, f"epochs={spec.epochs:g}") for key, text in problems])
    decide.record_fact("steps", str(steps), f"epochs={spec.epochs:g} of {items} items, {per_step} per step")
    return resolved


def _precompute_references(
    spec: JobSpec, models: Models, algorithm: Algorithm, data: Data, decide: Decisions, say: Callable[[str], None]
) -> None:
    """What the models that only score can compute before the first step."""
    if models.frozen:
        from runner.build.precompute_reference import precompute_references

        precompute_references(spec, models.frozen.values(), algorithm, data, decide, say)


def _checkpoint_callback(spec: JobSpec, built: BuiltJob, decide: Decisions) -> SaveCheckpoints:
    """What saves all of it, and with whom."""
    store, world = built.store, built.world
    store.peers, store.background, store.record_fact = world.world_peers, world.checkpoint_peers, decide.record_fact
    start = built.save if spec.checkpoint.asynchronous is False else built.start_saving
    return SaveCheckpoints(built.save, start, store.check, every=spec.checkpoint.every)


def _experience_queue(
    spec: JobSpec, algorithm: Algorithm, publisher: Publisher | None, device: torch.device, models: Models
) -> ExperienceQueue[Any]:
    """The queue of the algorithm's experiences, each sampled with the right version of the weights."""
    if isinstance(algorithm, PackedAlgorithm) and device.type != "cpu":  # where a thread costs more than it saves
        return ReadAheadQueue(algorithm, models.learners, spec.steps)
    due = algorithm.collect if publisher is None else publisher.before(algorithm.collect)

    def collect(step: int) -> Any:
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)  # a new thread begins on the machine's first card
        return due(step)

    return ExperienceQueue(collect, spec.steps, algorithm.lag, encode=algorithm.encode, decode=algorithm.decode)


def _identity(spec: JobSpec, resolved: JobSpec, data: Data, models: Models, world: ParallelContext) -> dict[str, Any]:
    """What a checkpoint says of the job that wrote it; resolved: with the numbers that were chosen."""

    def origins() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        frozen = {role: dict(one.base_fingerprint) for role, one in models.frozen.items()}
        return dict(models.model.base_fingerprint), frozen | reward_origins(spec)

    origin, frozen = run_on_rank0(world.world_peers, origins)  # which has read the weights
    own = run_identity(spec, data.fingerprint, data.prompt_style, origin, world.device.describe())
    tokens = resolved.algorithm.micro_batch_tokens
    chosen = {} if tokens == spec.algorithm.micro_batch_tokens else {"micro_batch_tokens": tokens}
    return own | chosen | {"frozen": frozen, "mesh": world.layout} | plug_in_digests(spec)


def _plugin_callbacks(
    spec: JobSpec, folder: RunFolder, model: TrainableModel, outlets: OutputSinks, place: RankInfo, decide: Decisions
) -> dict[str, Callback]:
    """The callbacks of plug-ins that the job chooses, by the names of their sections."""
    context = {"folder": folder, "model": model, "say": outlets.say, "is_rank0": place.is_rank0, "decide": decide}
    chosen = spec.callbacks.by_name.items()
    return {f"callback.{name}": default_registry().factory(config)(config, **context) for name, config in chosen}


def _callbacks(
    spec: JobSpec,
    folder: RunFolder,
    evaluate: Callable[[int], Report] | None,
    activity: DeviceStats,
    publisher: Publisher | None,
    outlets: OutputSinks,
    decide: Decisions,
    own: Iterable[Callback],
) -> list[Callback]:
    """All callbacks except saving. own: those of plug-ins, whose metrics are recorded too."""
    if (best := spec.checkpoint.best) and best.startswith("eval/"):
        evaluated, saved = spec.evaluation.every, spec.checkpoint.every
        if evaluate is None:
            decide("checkpoint.best", best, "none", "no evaluation")
        elif not saved or evaluated % saved:
            text = f"evaluation.every={evaluated} and checkpoint.every={saved}, so not all evaluated steps are saved"
            decide.record_fact("checkpoint.best", "the best of the saved steps", text)
    return [
        *([] if evaluate is None else [_evaluation(spec, evaluate, outlets)]),
        *([activity] if spec.watch.device_stats_interval_s else []),
        *([] if publisher is None else [publisher]),
        *own,
        HangWatch(folder.stacks, spec.watch.hang_timeout_s),
        LogStep(outlets.step),
        *([ZeroVarianceWarning()] if spec.algorithm.needs_reward else []),
        LogRollouts(outlets.rollouts, spec.watch.logged_rollouts),
    ]


def _evaluation(spec: JobSpec, evaluate: Callable[[int], Report], outlets: OutputSinks) -> RunEvaluation:
    return RunEvaluation(
        evaluate,
        every=spec.evaluation.every,
        record=outlets.samples,
        log_first=outlets.log_first,
        say=outlets.say,
        at_start=spec.evaluation.at_start,
    )
