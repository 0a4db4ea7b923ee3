"""What evaluates a job: with its environment, its sampler's stops, and within its model's positions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.build.components import Models, build_tokenizer
from runner.build.data import build_data
from runner.build.environments import build_extend
from runner.build.evaluation import build_evaluation
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.interfaces.model import ChooseTokens, Row
from runner.model.tiny import byte_tokenizer
from runner.spec.registry import default_registry
from runner.trainer.evaluator import Report
from tests.parallelism.worlds import alone
from tests.trainer.test_learner import learner

TOOL = ["+recipe=tool_demo", "init_from=null", "data.items=16", "data.held_out=6"]
ROWS = ["data=file", "data.path=rows.jsonl", "data.eval_path=rows.jsonl", "data.cache=false", "model=tiny"]
[NEWLINE] = byte_tokenizer(512)("\n", add_special_tokens=False)["input_ids"]


class Scripted:
    """A model, and its decoder, that says to each prompt what `says` makes of its text, token by token."""

    length_limit: tuple[int, str] | None = None
    summon_full_params = staticmethod(nullcontext)
    routing = None

    def __init__(self, tokenizer: Any, says: Callable[[str], str]) -> None:
        self.tokenizer, self._says = tokenizer, says
        self.stop_token_ids, self.vocab_size = frozenset({tokenizer.eos_token_id}), len(tokenizer)

    def batch_decoder(self, **_: Any) -> Scripted:
        return self

    def decode(
        self, rows: Sequence[Row], choose: ChooseTokens[Row], max_rows: int, newer: Any, record: Any = None
    ) -> None:
        logits = torch.eye(self.vocab_size)
        for row in rows:
            text = self._says(self.tokenizer.decode(row.prompt_ids))
            ids = iter([*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id])
            while not row.is_finished:
                choose(logits[[next(ids)]], [row])


def asks_a_calculator(prompt: str) -> str:
    """What the tool said, or else the question's sum as a call."""
    said = re.search(r"<\|im_start\|>tool\n(.*)<\|im_end\|>", prompt)
    asked = re.search(r"sum (.*)<\|im_end\|>", prompt)
    assert asked is not None
    return said[1] if said else f"calc {asked[1].replace(' ', '+')}"


def evaluation(
    words: Sequence[str],
    says: Callable[[str], str],
    longest: tuple[int, str] | None = None,
    decide: Decisions | None = None,
) -> Callable[[], Report]:
    """That of the job that these words make, of a model that follows a script."""
    decide = decide or Decisions(strict=True)
    spec = compose_job(words).spec
    tokenizer = build_tokenizer(spec, Decisions())
    model = Scripted(tokenizer, says)
    model.length_limit = longest
    environments = default_registry().factory(spec.environment)(spec.environment, decide=decide)
    algorithm: Any = None  # nothing is trained
    data = build_data(spec, tokenizer, decide)
    extend = build_extend(spec, tokenizer, environments, decide)
    models = Models({"policy": learner()}, {}, model, {})
    made = build_evaluation(spec, data, models, algorithm, alone(), environments, decide, extend)
    assert made is not None
    return made


def test_episodes_are_evaluated_in_the_environment_that_they_are_learnt_in(workdir: Path) -> None:
    report = evaluation(TOOL, asks_a_calculator)()
    assert report.values["eval/exact_match"] == 1 and "eval/loss" not in report.values
    assert [[turn["role"] for turn in sample["turns"]] for sample in report.samples] == [["assistant", "tool"]] * 6


def test_a_greedy_answer_ends_where_a_sampled_one_does(workdir: Path) -> None:
    def wordy(prompt: str) -> str:
        return asks_a_calculator(prompt) + "\nand more"

    assert evaluation(TOOL, wordy)().values["eval/exact_match"] == 0
    for stop in ('sampler.stop=["\n"]', f"sampler.stop_token_ids=[{NEWLINE}]"):
        report = evaluation([*TOOL, stop], wordy)()
        assert report.values["eval/exact_match"] == 1
        assert all(sample["answer"] == sample["expected"] + "\n" for sample in report.samples), "as a reward sees it"


def test_a_limit_that_no_answer_can_reach_is_refused_and_one_that_some_cannot_is_said(workdir: Path) -> None:
    lines = [json.dumps({"prompt": "a" * length, "completion": "b"}) for length in (8, 5, 5, 6)]
    Path("rows.jsonl").write_text("\n".join(lines))

    def limited(positions: int, strict: bool = False) -> str:
        decide = Decisions(strict=strict)
        words = [*ROWS, "evaluation.max_new_tokens=20"]
        evaluation(words, str, (positions, f"the model has {positions} positions"), decide)
        return "\n".join(str(one) for one in decide.entries if one.feature == "evaluation.max_new_tokens")

    text = "no completion can have 20 tokens: the model has 24 positions, .* shortest .* has 5; the maximum is 19"
    with pytest.raises(SpecError, match=rf"evaluation\.max_new_tokens: {text}"):
        limited(24)
    assert "evaluation.max_new_tokens: 17 to 19 for 2 of 4 questions instead of 20 tokens" in limited(25)
    with pytest.raises(EnvironmentProblem, match=r"evaluation\.max_new_tokens"):
        limited(27, strict=True)
    assert limited(28, strict=True) == ""
