"""Evaluation of a job: greedy answers to held-out questions, the loss on held-out items, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from runner.algorithm.episodes.episode import EpisodeRunner
from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError
from runner.interfaces import (
    Algorithm,
    Data,
    EnvironmentFactory,
    EvalQuestion,
    ExtendConversation,
    Model,
    StopCriterion,
    TrainableModel,
    as_generative,
)
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import PartitionedAnswerer
from runner.sampler.sampling import StopCriteria
from runner.spec.job import JobSpec
from runner.trainer.evaluator import Evaluator, HeldOutLoss, LearnsFromItems, Remembered, Report, askable
from runner.trainer.learner import LocalLearner
from runner.trainer.reference_model import FrozenModel


def build_evaluation(
    spec: JobSpec,
    data: Data,
    learner: LocalLearner,
    model: TrainableModel,
    algorithm: Algorithm,
    models: Mapping[str, Model],
    world: ParallelContext,
    environments: EnvironmentFactory | None,
    decide: Decisions,
    extend: ExtendConversation | None = None,
) -> Callable[[], Report] | None:
    """The evaluation of the job, None where there is nothing to evaluate."""
    found: list[Callable[[], Report]] = []
    questions, items = data.held_out_questions(), data.held_out_items()
    if isinstance(algorithm, LearnsFromItems) and (items or questions):
        shown = spec.evaluation.samples if items else 0  # questions are shown with their answers
        given = items or [question.item for question in questions]
        held_out = HeldOutLoss(algorithm, given, spec.algorithm.batch_size, shown, model.tokenizer)
        known = {role: Remembered(one) if isinstance(one, FrozenModel) else one for role, one in models.items()}
        found.append(lambda: held_out.evaluate(known))
    if questions and (policy := as_generative(model)) is not None:
        limit = spec.evaluation.max_new_tokens
        asked = askable(questions, model.tokenizer, limit, decide)
        _check_room(asked, limit, model.length_limit, decide)
        finish = _stop_criterion(spec, model.tokenizer)
        ask = Evaluator(questions, asked, spec.evaluation.batch_size, limit, finish=finish)
        if environments is not None:  # a single answer is not what is trained on, so it has no loss
            longest = None if model.length_limit is None else model.length_limit[0]
            converse = EpisodeRunner(model.tokenizer, environments, extend, longest).run_greedy
            ask = Evaluator((), asked, spec.evaluation.batch_size, limit, converse, finish)
        answerer = PartitionedAnswerer(policy, world.world_peers, partial(world.summon_full_params, model))
        found.append(lambda: ask.evaluate(learner, answerer))
    if not found:
        decide(
            "evaluation",
            f"every {spec.evaluation.every} steps",
            "none",
            f"data={spec.data.name} holds nothing out; to say so: evaluation.every=0",
        )
        return None
    return partial(_merge_evaluations, found)


def _stop_criterion(spec: JobSpec, tokenizer: Any) -> StopCriterion | None:
    """What ends a sampled answer, so that the greedy one ends there too; None where nothing is sampled."""
    if not spec.algorithm.needs_sampler:
        return None
    strings, ids = spec.sampler.stop_criteria()
    return StopCriteria(tokenizer, frozenset(ids), strings).finish_reason


def _check_room(asked: Sequence[EvalQuestion], wanted: int, longest: tuple[int, str] | None, decide: Decisions) -> None:
    """Say how many answers may be shorter than `wanted` tokens because of the model's maximum length.

    Raises SpecError if all of them may.
    """
    if longest is None or not asked:
        return
    key, (most, reason) = "evaluation.max_new_tokens", longest
    rooms = [most - len(question.prompt_ids) for question in asked]
    less = [room for room in rooms if room < wanted]
    if len(less) == len(rooms):
        text = f"no answer can have {wanted} tokens: {reason}, and the shortest held-out prompt takes"
        raise SpecError([Problem(key, f"{text} {most - max(rooms)}; {max(rooms)} is the most")])
    if less:
        decide(key, f"{wanted} tokens", f"{min(less)} to {max(less)} for {len(less)} of {len(rooms)} questions", reason)


def _merge_evaluations(evaluations: Sequence[Callable[[], Report]]) -> Report:
    """Merge evaluations; later numbers win over earlier ones of the same name, times are summed."""
    reports = [evaluate() for evaluate in evaluations]
    values = {name: value for report in reports for name, value in report.values.items()}
    values["time/eval_s"] = sum(report.values["time/eval_s"] for report in reports)
    return Report(values, [sample for report in reports for sample in report.samples])
