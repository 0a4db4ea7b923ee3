"""Evaluation: the loss and the exact match against direct counting, and no trace in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.core.batch import pack
from runner.core.errors import EnvironmentProblem, OutOfMemory
from runner.interfaces import EvalQuestion, Prompt, TokenizedExample
from runner.trainer.evaluator import Evaluator, askable
from tests.trainer.test_learner import batch, learner


class Digits:
    """Decodes ids to digits."""

    @staticmethod
    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(map(str, ids))


@dataclass(frozen=True)
class Answer:
    text: str
    history: tuple[Mapping[str, Any], ...] = ()


def collect(prompts: Sequence[Prompt]) -> list[Answer]:
    """Answers every prompt with its ids in order."""
    return [Answer("".join(map(str, sorted(prompt.ids)))) for prompt in prompts]


def question(prompt: tuple[int, ...], answer: tuple[int, ...]) -> EvalQuestion:
    item = TokenizedExample(prompt + answer, (0.0,) * len(prompt) + (1.0,) * len(answer))
    return EvalQuestion(item, prompt, "".join(map(str, prompt)), "".join(map(str, answer)))


QUESTIONS = [question((3, 1), (1, 3)), question((2, 1), (2, 1)), question((5, 4, 6), (4, 5, 6))]


@pytest.mark.parametrize("batch_size", [1, 2, 10])
def test_numbers_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    subject = learner()
    report = Evaluator(QUESTIONS, QUESTIONS, batch_size, 8, collect).evaluate(subject)
    whole = pack([q.item.ids for q in QUESTIONS], [q.item.weights for q in QUESTIONS])
    logprobs = subject.forward(whole, frozenset({"logprobs"}))["logprobs"]
    weight = whole.tokens["weight"]
    assert report.values["eval/loss"] == pytest.approx(float(-(weight * logprobs).sum() / weight.sum()))
    assert report.values["eval/exact_match"] == pytest.approx(2 / 3)
    assert [s["exact"] for s in report.samples] == [True, False, True]


def test_all_questions_are_handed_over_at_once() -> None:
    """So that an answer that ends makes room for the next question."""
    asked: list[int] = []

    def count(prompts: Sequence[Prompt]) -> list[Answer]:
        asked.append(len(prompts))
        return collect(prompts)

    assert len(Evaluator(QUESTIONS, QUESTIONS, 2, 8, count).evaluate(learner()).samples) == 3
    assert asked == [3]


def test_plain_text_has_a_loss_and_no_answers() -> None:
    text = [EvalQuestion(TokenizedExample((1, 2, 3), (0.0, 1.0, 1.0)))]
    assert askable(text, Digits, 8, Decisions(strict=True)) == []
    report = Evaluator(text, [], 4, 8, collect).evaluate(learner())
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
                Evaluator(QUESTIONS, QUESTIONS, 2, 8, collect).evaluate(subject)
        return subject.model.trainable()["table"].detach()

    assert torch.equal(train(True), train(False))


def test_an_answer_that_cannot_be_given_within_the_limit_is_not_asked_for_and_that_is_said() -> None:
    decide = Decisions()
    asked = askable(QUESTIONS, Digits, 2, decide)
    assert asked == QUESTIONS[:2], "the third has three tokens"
    assert "eval/exact_match: 2; 1 are left out instead of 3 questions" in str(decide.entries[0])
    assert "evaluation.max_new_tokens=2" in str(decide.entries[0])
    report = Evaluator(QUESTIONS, asked, 4, 2, collect).evaluate(learner())
    assert report.values["eval/exact_match"] == 0.5 and len(report.samples) == 2
    whole = Evaluator(QUESTIONS, QUESTIONS, 4, 8, collect).evaluate(learner())
    assert report.values["eval/loss"] == whole.values["eval/loss"], "the loss is that of all of them"
    with pytest.raises(EnvironmentProblem, match="left out"):
        askable(QUESTIONS, Digits, 2, Decisions(strict=True))


def test_an_answer_of_just_the_limit_and_text_behind_it_are_fine() -> None:
    decide = Decisions(strict=True)
    assert askable(QUESTIONS, Digits, 3, decide) == QUESTIONS
    longer = EvalQuestion(
        TokenizedExample((3, 1, 1, 3, 7, 7, 7), (0.0,) * 7), (3, 1), "31", "13"
    )  # e.g. a turn after the answer
    assert askable([longer], Digits, 2, decide) == [longer]


def test_memory_that_evaluation_exhausts_is_blamed_on_the_right_option() -> None:
    def exhaust(prompts: Sequence[Prompt]) -> list[Answer]:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB\nand a long table")

    with pytest.raises(OutOfMemory, match=r"2 answers at once: tried to allocate 7 GiB\n.*evaluation\.batch_size"):
        Evaluator(QUESTIONS, QUESTIONS, 2, 8, exhaust).evaluate(learner())
