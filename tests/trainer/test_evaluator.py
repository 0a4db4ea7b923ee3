"""Evaluation of greedy answers: loss and exact match against direct counting, and no trace in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.algorithm.rollouts import Group, RolloutSample
from runner.core.auto_choices import Decisions
from runner.core.batch import pack
from runner.core.errors import EnvironmentProblem, OutOfMemory
from runner.interfaces import EvalQuestion, Model, Prompt, TokenizedExample
from runner.trainer import answer_evaluator
from runner.trainer.answer_evaluator import AnswerEvaluator
from runner.trainer.evaluator import Report, question_loss, score_items
from tests.trainer.test_learner import batch, learner


class Digits:
    """Decodes ids to digits."""

    @staticmethod
    def decode(ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(str, ids))


def collect(prompts: Sequence[Prompt], step: int, round: int, finished: int = 0) -> list[Group]:
    """Answers every prompt with its ids in order."""
    texts = ["".join(map(str, sorted(prompt.ids))) for prompt in prompts]
    samples = [RolloutSample((), (1.0,) * len(text), (), text, "stop", 0, None) for text in texts]
    return [Group(prompt, (sample,)) for prompt, sample in zip(prompts, samples, strict=True)]


def evaluate(
    model: Model,
    questions: Sequence[EvalQuestion],
    asked: Sequence[EvalQuestion],
    batch_size: int,
    collect: Callable[..., list[Group]] = collect,
) -> Report:
    collector: Any = SimpleNamespace(reward=None, tokenizer=None, group_size=1, collect_groups=collect)
    loss = partial(question_loss, [one.item for one in questions], partial(score_items, model), batch_size)
    return AnswerEvaluator(asked, asked, collector, loss, "eval", "evaluation", 1.0, is_greedy=True).evaluate()


def eligible_questions(questions: Sequence[EvalQuestion], limit: int, decide: Decisions) -> list[EvalQuestion]:
    return answer_evaluator.eligible_questions(questions, Digits, limit, decide, "eval", "evaluation")


def question(prompt: tuple[int, ...], answer: tuple[int, ...]) -> EvalQuestion:
    item = TokenizedExample(prompt + answer, (0.0,) * len(prompt) + (1.0,) * len(answer))
    return EvalQuestion(item, prompt, "".join(map(str, prompt)), "".join(map(str, answer)))


QUESTIONS = [question((3, 1), (1, 3)), question((2, 1), (2, 1)), question((5, 4, 6), (4, 5, 6))]


@pytest.mark.parametrize("batch_size", [1, 2, 10])
def test_numbers_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    subject = learner()
    report = evaluate(subject, QUESTIONS, QUESTIONS, batch_size)
    whole = pack([q.item.ids for q in QUESTIONS], [q.item.weights for q in QUESTIONS])
    logprobs = subject.forward(whole, frozenset({"logprobs"}))["logprobs"]
    weight = whole.tokens["weight"]
    assert report.values["eval/loss"] == pytest.approx(float(-(weight * logprobs).sum() / weight.sum()))
    assert report.values["eval/exact_match"] == pytest.approx(2 / 3)
    assert [s["exact"] for s in report.samples] == [True, False, True]
    assert report.values["eval/length"] == pytest.approx(7 / 3) and report.values["eval/truncated_frac"] == 0
    low, high = report.values["eval/loss_ci_low"], report.values["eval/loss_ci_high"]
    assert low < report.values["eval/loss"] < high


def test_all_questions_are_handed_over_at_once() -> None:
    """So that an answer that ends makes room for the next question."""
    asked: list[int] = []

    def count(prompts: Sequence[Prompt], step: int, round: int, finished: int = 0) -> list[Group]:
        asked.append(len(prompts))
        return collect(prompts, step, round)

    assert len(evaluate(learner(), QUESTIONS, QUESTIONS, 2, count).samples) == 3
    assert asked == [3]


def test_plain_text_has_a_loss_and_no_answers() -> None:
    text = [EvalQuestion(TokenizedExample((1, 2, 3), (0.0, 1.0, 1.0)))]
    assert eligible_questions(text, 8, Decisions(strict=True)) == []
    report = evaluate(learner(), text, [], 4)
    assert "eval/loss" in report.values and "eval/exact_match" not in report.values and report.samples == []


def test_evaluating_changes_no_bit_of_training() -> None:
    from runner.algorithm.sft import CrossEntropy

    def train(evaluates: bool) -> torch.Tensor:
        subject = learner()
        for step in range(3):
            subject.begin_step(step)
            subject.forward_backward(batch(), CrossEntropy())
            subject.optim_step()
            if evaluates:
                evaluate(subject, QUESTIONS, QUESTIONS, 2)
        return subject.model.trainable()["table"].detach()

    assert torch.equal(train(True), train(False))


def test_an_answer_that_cannot_be_given_within_the_limit_is_not_asked_for_and_that_is_said() -> None:
    decide = Decisions()
    asked = eligible_questions(QUESTIONS, 2, decide)
    assert asked == QUESTIONS[:2], "the third has three tokens"
    assert "eval/exact_match: 2; 1 are left out instead of 3 questions" in str(decide.entries[0])
    assert "evaluation.max_new_tokens=2" in str(decide.entries[0])
    report = evaluate(learner(), QUESTIONS, asked, 4)
    assert report.values["eval/exact_match"] == 0.5 and len(report.samples) == 2
    whole = evaluate(learner(), QUESTIONS, QUESTIONS, 4)
    assert report.values["eval/loss"] == whole.values["eval/loss"], "the loss is that of all of them"
    with pytest.raises(EnvironmentProblem, match="left out"):
        eligible_questions(QUESTIONS, 2, Decisions(strict=True))


def test_an_answer_of_just_the_limit_and_text_behind_it_are_fine() -> None:
    decide = Decisions(strict=True)
    assert eligible_questions(QUESTIONS, 3, decide) == QUESTIONS
    longer = EvalQuestion(
        TokenizedExample((3, 1, 1, 3, 7, 7, 7), (0.0,) * 7), (3, 1), "31", "13"
    )  # e.g. a turn after the answer
    assert eligible_questions([longer], 2, decide) == [longer]


def test_memory_that_evaluation_exhausts_is_blamed_on_the_right_option() -> None:
    def exhaust(prompts: Sequence[Prompt], step: int, round: int, finished: int = 0) -> list[Group]:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB\nand a long table")

    with pytest.raises(OutOfMemory, match=r"tried to allocate 7 GiB\n.*evaluation\.batch_size or evaluation\.max_new"):
        evaluate(learner(), QUESTIONS, QUESTIONS, 2, exhaust)
