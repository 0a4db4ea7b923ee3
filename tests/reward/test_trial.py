"""Rewards are tried on four rows before the model is loaded: in whole commands, and what is warned of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.core.auto_choices import Decisions
from runner.interfaces import Prompt
from runner.model.tiny import byte_tokenizer
from runner.reward.config import (
    ExactConfig,
    FormatConfig,
    FunctionConfig,
    LengthConfig,
    NumericConfig,
    RewardConfig,
    SumConfig,
)
from runner.reward.trial import try_reward
from tests.command import run
from tests.reward.samples import made

SMALL = (
    "+recipe=grpo_demo",
    "init_from=null",
    "model.hidden_size=16",
    "model.layers=1",
    "evaluation.every=0",
    "algorithm.batch_size=2",
    "algorithm.group_size=2",
    "sampler.max_new_tokens=4",
    "tracker=none",
)


def score_with(folder: Path, body: str) -> str:
    (folder / "score.py").write_text(f"def score(completions, answer, **_):\n    {body}\n")
    return "reward.path=score.py:score"


def test_the_scores_of_four_rows_are_shown_and_recorded(tmp_path: Path) -> None:
    path = score_with(tmp_path, "return [4.0 if c[-1]['content'] == a else -1.0 for c, a in zip(completions, answer)]")
    said = run(*SMALL, "reward=function", path, "steps=1", cwd=tmp_path)
    assert "row 1: 4; row 2: 4; row 3: 4; row 4: 4" in said and said.index("row 1: 4") < said.index("step ")
    manifest = json.loads((tmp_path / "outputs/latest/manifest.json").read_text())
    assert "row 1: 4; row 2: 4" in json.dumps(manifest)


def test_a_function_that_raises_ends_the_job_before_the_model_is_loaded(tmp_path: Path) -> None:
    """The model's folder is not there either, which is not reached."""
    path = score_with(tmp_path, "return [int(answer[0]) / 0]")
    said = run(*SMALL, "reward=function", path, cwd=tmp_path, code=3)
    assert (
        "reward raises an exception on row 1 of the data" in said
        and "score.py:2" in said
        and "ZeroDivisionError" in said
    )
    assert "parameters" not in said and "reward.log" in said


def test_a_part_of_a_sum_is_named(tmp_path: Path) -> None:
    score_with(tmp_path, "raise KeyError('points')")
    parts = "reward.parts=[{name:length,target:4},{name:function,path:'score.py:score'}]"
    said = run(*SMALL, "reward=sum", parts, cwd=tmp_path, code=3)
    assert "reward.parts[1] raises an exception on row 1" in said and "KeyError" in said


@pytest.mark.parametrize("body", ["return [None] * len(completions)", "return ['high'] * len(completions)"])
def test_a_row_without_a_score_ends_nothing_and_is_not_counted(tmp_path: Path, body: str) -> None:
    """max_failures=3 is reached by the groups of the steps alone: two of step 1, one of step 2."""
    words = ("reward=function", score_with(tmp_path, body), "reward.max_failures=3", "steps=3")
    said = run(*SMALL, *words, cwd=tmp_path, code=3)
    assert "row 1: " in said and "no sample of 3 groups in a row" in said
    lines = (tmp_path / "outputs/latest/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_the_reward_of_an_evaluation_set_is_tried_and_named(tmp_path: Path) -> None:
    score_with(tmp_path, "raise KeyError('points')")
    sets = "evaluation.sets={hard: {reward: {name: function, path: 'score.py:score'}}}"
    said = run(*(word for word in SMALL if word != "evaluation.every=0"), "data.held_out=2", sets, cwd=tmp_path, code=3)
    assert "evaluation.sets.hard.reward raises an exception on row 1" in said and "KeyError" in said


def test_training_and_evaluation_know_their_step(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "def score(completions, trainer_state):\n"
        "    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)\n"
    )
    words = [word for word in SMALL if not word.startswith("evaluation")]
    more = (
        "evaluation.every=1",
        "evaluation.max_new_tokens=2",
        "data.items=16",
        "data.held_out=2",
        "steps=2",
        "checkpoint.best=null",
    )
    run(*words, *more, "algorithm.zero_variance=keep", "reward=function", "reward.path=score.py:score", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "outputs/latest/metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: (row.get("reward/mean"), row["eval/reward/mean"]) for row in rows}
    assert found == {0: (None, 0.0), 1: (0.0, 0.5), 2: (0.5, 1.0)}


def warnings_of(config: RewardConfig, answers: Sequence[Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    tokenizer, reward = byte_tokenizer(64), made(config)
    prompts = [Prompt((1,), "2+2?", None, {"answer": answer}) for answer in answers]
    caplog.clear()
    try:
        try_reward(reward, config, prompts, tokenizer, Decisions())
    finally:
        reward.close()
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


NUMBERS = ("1 + 2 = 3", "2 + 2 = 4", "2 + 3 = 5", "3 + 3 = 6")


def test_a_reward_that_tells_right_from_wrong_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(NumericConfig(), NUMBERS, caplog) == []
    assert warnings_of(NumericConfig(), ("#### 3", "so #### 3", "#### 4", "#### 5"), caplog) == [], "two are equal"
    assert warnings_of(ExactConfig(), ("A", "A", "A", "A"), caplog) == [], "there is no wrong one"
    assert warnings_of(ExactConfig(), ("A", "B"), caplog) == []


def test_a_right_answer_that_scores_0_is_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    score_with(tmp_path, "return [float(c == '5') for c in completions]")
    config = FunctionConfig(path=f"{tmp_path}/score.py:score")
    [said] = warnings_of(config, NUMBERS, caplog)
    assert "reward gives row 1 0 for its own answer, the column answer: '1 + 2 = 3'" in said


def test_a_wrong_answer_that_scores_as_much_is_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    score_with(tmp_path, "return [float(c.isprintable()) for c in completions]")
    part = {"name": "function", "path": f"{tmp_path}/score.py:score"}
    [said] = warnings_of(SumConfig(parts=({"name": "length", "target": 4}, part)), NUMBERS, caplog)
    assert said == (
        "reward.parts[1] gives another row's answer as much as the row's own: "
        "row 1 1 for '1 + 2 = 3', 1 for '2 + 2 = 4'"
    )


def test_a_penalty_for_wrong_answers_alone_is_no_fault(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    score_with(tmp_path, "return [-float(c != a) for c, a in zip(completions, answer)]")
    assert warnings_of(FunctionConfig(path=f"{tmp_path}/score.py:score"), NUMBERS, caplog) == []


@pytest.mark.parametrize(
    "config", [LengthConfig(target=4), FormatConfig(pattern="x"), ExactConfig(extract="<a>(.*?)</a>")]
)
def test_what_compares_with_no_answer_is_not_warned_of(config: RewardConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(config, NUMBERS, caplog) == []
