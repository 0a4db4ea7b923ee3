"""What evaluates a job: greedy answers to held-out questions, the algorithm's loss on held-out items, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from runner.algorithm.episodes.episode import Player
from runner.algorithm.episodes.turns import Turns
from runner.decisions import Decisions
from runner.evaluator import Evaluator, Report, askable
from runner.held_out_loss import HeldOutLoss, LearnsFromItems
from runner.learner import LocalLearner
from runner.protocols import Algorithm, Data, Environments, Model, Ranks
from runner.spec.job import JobSpec


def build_evaluation(
    spec: JobSpec,
    data: Data,
    learner: LocalLearner,
    model: Any,
    algorithm: Algorithm,
    models: Mapping[str, Model],
    ranks: Ranks,
    environments: Environments | None,
    decide: Decisions,
) -> Callable[[], Report] | None:
    """The evaluation of the job, None where there is nothing to evaluate or it is not wanted."""
    if spec.evaluation.every == 0:
        return None
    found: list[Callable[[], Report]] = []
    questions, items = data.held_out(), data.held_out_items()
    if questions and hasattr(model, "generate"):
        limit = spec.evaluation.max_new_tokens
        asked = askable(questions, model.tokenizer, limit, decide)
        ask = Evaluator(questions, asked, spec.evaluation.batch_size, limit)
        if environments is not None:  # an answer given at once is not what is learnt, so it has no loss worth knowing
            converse = Player(model.tokenizer, environments, Turns(model.tokenizer)).greedy
            ask = Evaluator((), asked, spec.evaluation.batch_size, limit, converse)
        found.append(lambda: ask.evaluate(learner, model))
    if items and isinstance(algorithm, LearnsFromItems):
        wanted = spec.evaluation
        held_out = HeldOutLoss(algorithm, items, spec.algorithm.batch_size, wanted.samples, model.tokenizer, ranks)
        found.append(lambda: held_out.evaluate(models))
    if not found:
        decide(
            "evaluation",
            f"every {spec.evaluation.every} steps",
            "none",
            f"data={spec.data.name} holds nothing out; to say so: evaluation.every=0",
        )
        return None
    return partial(_together, found)


def _together(evaluations: Sequence[Callable[[], Report]]) -> Report:
    """Several evaluations as one; later numbers win over earlier ones of the same name."""
    reports = [evaluate() for evaluate in evaluations]
    return Report(
        {name: value for report in reports for name, value in report.values.items()},
        [sample for report in reports for sample in report.samples],
    )
