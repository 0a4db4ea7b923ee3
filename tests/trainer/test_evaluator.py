"""Evaluation: the loss and the exact match against direct counting, and no trace in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.core.batch import pack
from runner.core.errors import EnvironmentProblem, OutOfMemory
from runner.interfaces import EvalQuestion, GreedyOutput, StopCriterion, TokenizedExample
from runner.model.generation import finish_at_limit
from runner.trainer.evaluator import Evaluator, askable
from tests.trainer.test_learner import batch, learner


class Digits:
    """Decodes ids to digits; answers every prompt with its ids in order."""

    class tokenizer:
        @staticmethod
        def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
            return "".join(map(str, ids))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rows: int | None = None,
        finish: StopCriterion = finish_at_limit,
    ) -> list[GreedyOutput]:
        return [GreedyOutput(tuple(sorted(p)[:max_new_tokens]), "stop") for p in prompts]


def question(prompt: tuple[int, ...], answer: tuple[int, ...]) -> EvalQuestion:
    item = TokenizedExample(prompt + answer, (0.0,) * len(prompt) + (1.0,) * len(answer))
    return EvalQuestion(item, prompt, "".join(map(str, prompt)), "".join(map(str, answer)))


QUESTIONS = [question((3, 1), (1, 3)), question((2, 1), (2, 1)), question((5, 4, 6), (4, 5, 6))]


@pytest.mark.parametrize("batch_size", [1, 2, 10])
def test_numbers_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    subject = learner()
    report = Evaluator(QUESTIONS, QUESTIONS, batch_size, 8).evaluate(subject, Digits())
    whole = pack([q.item.ids for q in QUESTIONS], [q.item.weights for q in QUESTIONS])
    logprobs = subject.forward(whole, frozenset({"logprobs"}))["logprobs"]
    weight = whole.tokens["weight"]
    assert report.values["eval/loss"] == pytest.approx(float(-(weight * logprobs).sum() / weight.sum()))
    assert report.values["eval/exact_match"] == pytest.approx(2 / 3)
    assert [s["exact"] for s in report.samples] == [True, False, True]


def test_all_questions_are_handed_over_at_once_and_as_many_as_wanted_are_in_work() -> None:
    """So that an answer that ends makes room for the next question."""
    asked: list[tuple[int, int | None]] = []

    class Counts(Digits):
        def generate(self, prompts: Sequence[Sequence[int]], *limits: Any, **more: Any) -> list[GreedyOutput]:
            asked.append((len(prompts), more["rows"]))
            return super().generate(prompts, *limits, **more)

    assert len(Evaluator(QUESTIONS, QUESTIONS, 2, 8).evaluate(learner(), Counts()).samples) == 3
    assert asked == [(3, 2)]


def test_plain_text_has_a_loss_and_no_answers() -> None:
    text = [EvalQuestion(TokenizedExample((1, 2, 3), (0.0, 1.0, 1.0)))]
    assert askable(text, Digits.tokenizer, 8, Decisions(strict=True)) == []
    report = Evaluator(text, [], 4, 8).evaluate(learner(), Digits())
    assert "eval/loss" in report.values and "eval/exact_match" not in report.values and report.samples == []


def test_evaluating_changes_no_bit_of_training() -> None:
    from runner.algorithm.sft import CrossEntropy

    def train(evaluate: bool) -> torch.Tensor:
        subject = learner()
        for step in range(3):
            subject.begin_step(step)
            subject.forward_backward(batch(), CrossEntropy())
            subject.optim_step()
            if evaluate:
                Evaluator(QUESTIONS, QUESTIONS, 2, 8).evaluate(subject, Digits())
        return subject.model.trainable()["table"].detach()

    assert torch.equal(train(True), train(False))


def test_an_answer_that_cannot_be_given_within_the_limit_is_not_asked_for_and_that_is_said() -> None:
    decide = Decisions()
    asked = askable(QUESTIONS, Digits.tokenizer, 2, decide)
    assert asked == QUESTIONS[:2], "the third has three tokens"
    assert "eval/exact_match: 2; 1 are left out instead of 3 questions" in str(decide.entries[0])
    assert "evaluation.max_new_tokens=2" in str(decide.entries[0])
    report = Evaluator(QUESTIONS, asked, 4, 2).evaluate(learner(), Digits())
    assert report.values["eval/exact_match"] == 0.5 and len(report.samples) == 2
    whole = Evaluator(QUESTIONS, QUESTIONS, 4, 8).evaluate(learner(), Digits())
    assert report.values["eval/loss"] == whole.values["eval/loss"], "the loss is that of all of them"
    with pytest.raises(EnvironmentProblem, match="left out"):
        askable(QUESTIONS, Digits.tokenizer, 2, Decisions(strict=True))


def test_an_answer_of_just_the_limit_and_text_behind_it_are_fine() -> None:
    decide = Decisions(strict=True)
    assert askable(QUESTIONS, Digits.tokenizer, 3, decide) == QUESTIONS
    longer = EvalQuestion(
        TokenizedExample((3, 1, 1, 3, 7, 7, 7), (0.0,) * 7), (3, 1), "31", "13"
    )  # e.g. a turn after the answer
    assert askable([longer], Digits.tokenizer, 2, decide) == [longer]


def test_memory_that_evaluation_exhausts_is_blamed_on_the_right_option() -> None:
    class Greedy(Digits):
        def generate(self, *arguments: object, **limits: object) -> list[GreedyOutput]:
            raise torch.OutOfMemoryError("tried to allocate 7 GiB\nand a long table")

    with pytest.raises(OutOfMemory, match=r"2 answers at once: tried to allocate 7 GiB\n.*evaluation\.batch_size"):
        Evaluator(QUESTIONS, QUESTIONS, 2, 8).evaluate(learner(), Greedy())
