"""What the evaluation of a job measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runner.build.evaluation import AnswerParts, no_reward
from runner.build.job import _callbacks
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.interfaces import EvalQuestion, TokenizedExample


def test_the_loss_is_of_plain_texts_and_expected_answers_that_the_model_can_hold() -> None:
    def question(tokens: int, prompt: str, answer: str) -> EvalQuestion:
        item = TokenizedExample((1,) * tokens, (0.0,) + (1.0,) * (tokens - 1))
        return EvalQuestion(item, (1,) if prompt else (), prompt, answer)

    decide, policy = Decisions(), SimpleNamespace(length_limit=(4, "its positions"))
    rest: Any = None
    parts = AnswerParts(rest, policy, rest, decide, no_reward, rest, None, None, rest)  # type: ignore[arg-type]
    held_out = [question(3, "p", "a"), question(5, "p", "a"), question(2, "p", ""), question(2, "", "")]
    assert parts._with_loss(held_out, "eval/x") == [held_out[0].item, held_out[3].item]
    [left_out] = decide.entries
    assert left_out.feature == "eval/x/loss" and left_out.got == "2; 1 are left out"


@pytest.mark.parametrize(
    ("every", "said"), [("checkpoint.every=10", 0), ("checkpoint.every=0", 1), ("checkpoint.every=15", 1)]
)
def test_measured_steps_that_cannot_be_the_best_are_said(every: str, said: int) -> None:
    spec = compose_job(["+recipe=sft_demo", "evaluation.every=20", every]).spec
    rest: Any = SimpleNamespace(stacks=None, samples=None, log_first=None, say=None, step=(), rollouts=())
    decide = Decisions()
    _callbacks(spec, rest, lambda step: rest, rest, rest, rest, decide, ())
    found = [entry for entry in decide.entries if entry.feature == "checkpoint.best"]
    assert len(found) == said and all("evaluation.every=20 and " + every in str(entry) for entry in found)
