"""Exact match with a column."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.errors import DataError
from runner.interfaces import Completion, Prompt
from runner.interfaces.rewards import UnscorableError, require_text
from runner.reward.config import ExactConfig, MathConfig, NumericConfig, RewardConfig
from runner.reward.rules import expected_number, is_equal
from tests.reward.samples import answer, made, scores


def test_blanks_around_an_answer_do_not_count_and_others_do() -> None:
    group = [answer(text, answer="forty two") for text in ("forty two", " forty two\n", "Forty two", "forty  two", "")]
    assert scores(ExactConfig(), *group) == [1, 1, 0, 0, 0]
    assert scores(ExactConfig(ignore_case=True), *group) == [1, 1, 1, 0, 0]


def test_a_number_in_the_column_is_compared_as_it_is_written() -> None:
    assert scores(ExactConfig(column="sum"), answer("4", sum=4), answer("4.0", sum=4)) == [1, 0]


def test_with_extract_the_last_match_is_the_answer_and_none_is_wrong() -> None:
    config = ExactConfig(extract="<a>(.*?)</a>")
    assert scores(config, *(answer(t, answer="4") for t in ("<a>5</a><a> 4 </a>", "<a>4</a><a>5</a>", "4"))) == [
        1,
        0,
        0,
    ]


@given(st.text(), st.text())
def test_equality_is_reflexive_and_symmetric(a: str, b: str) -> None:
    assert is_equal(a, f"\t{a} ") and is_equal(a, a.strip(), ignore_case=True)
    assert is_equal(a, b) == is_equal(b, a) and is_equal(a, b, True) == is_equal(b, a, True)


def test_a_row_without_the_column_has_no_score(caplog: pytest.LogCaptureFixture) -> None:
    assert scores(ExactConfig(), answer("4", solution="4"), answer("4", answer=None), answer("4", answer="4")) == [
        None,
        None,
        1,
    ]
    assert "column 'answer' is not there; the row has: solution (set reward.column)" in caplog.text


def test_a_column_that_no_row_has_stops_the_run() -> None:
    reward = made(ExactConfig(column="answr", max_failures=2))
    with pytest.raises(DataError, match=r"2 groups in a row .*\n.*'answr' is not there; the row has: answer"):
        reward.score([[answer("4", answer="4")]] * 2)


def test_a_pattern_is_checked_with_the_spec() -> None:
    assert ExactConfig(extract="a").problems(None)[0][0] == "reward.extract"
    assert ExactConfig(extract="(a)").problems(None) == [] == ExactConfig().problems(None)


@pytest.mark.parametrize("config", [ExactConfig, NumericConfig, MathConfig])
def test_a_column_inside_an_object_is_named_with_dots_and_an_object_is_no_text(config: type[RewardConfig]) -> None:
    row: dict[str, Any] = {"reward_model": {"ground_truth": "31", "style": "MATH_v2"}}
    good = answer("31", **row), answer("2", **row)
    assert scores(config.model_validate({"column": "reward_model.ground_truth"}), *good) == [1, 0]
    with pytest.raises(DataError, match="an object with the keys ground_truth, style") as raised:
        scores(config.model_validate({"column": "reward_model"}), *good)
    with pytest.raises(DataError, match="expected text or a number, found true or false"):
        scores(config(), answer("1", answer=True))
    assert "type reward.column=reward_model.ground_truth or reward.column=reward_model.style" in str(raised.value)


def test_a_message_marks_what_it_leaves_out_of_a_text() -> None:
    long = "x" * 100
    asked = Completion(Prompt((7, 8), long, None, {"answer": {"a": 1}}), (0,), "1", "stop")
    with pytest.raises(DataError, match=f"the row of the prompt '…{'x' * 60}'"):
        require_text(asked, "answer", "column")
    with pytest.raises(UnscorableError) as raised:
        expected_number(answer("1", answer=long), "answer")
    assert str(raised.value) == f"column 'answer' has no number but '{'x' * 80}…'"
