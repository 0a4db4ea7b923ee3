"""The last number of a text."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.errors import DataError
from runner.reward.config import ExactConfig, MathConfig, NumericConfig
from runner.reward.rules import is_close, last_number
from tests.reward.samples import answer, scores


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 18.", "18"),
        ("5-3", "3"),
        ("5 - 3 = -2", "-2"),
        ("x=−7", "-7"),
        ("答案是-5", "-5"),
        ("$1,234,567.50", "1234567.50"),
        ("1,2345", "2345"),
        ("12,34", "34"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("1e3 or -2.5E-2", "-0.025"),
        ("3/4", "4"),
        ("She sells 5.\n#### 72", "72"),
        ("none", None),
        ("1e99999999999999999999", None),
        ("9" * 5000, "9" * 100),
    ],
)
def test_the_last_number_is_read(text: str, number: str | None) -> None:
    found = last_number(text)
    if len(text) == 5000:  # rounded to 100 digits
        assert found is not None and found.adjusted() in (4999, 5000)
    else:
        assert found == (None if number is None else Decimal(number))


@given(st.integers(), st.text(alphabet="abc .,:;\n", max_size=5))
def test_any_integer_is_read_back(number: int, before: str) -> None:
    assert last_number(f"1 {before} {number}") == number
    assert last_number(f"1 {before} {number:,}") == number


def test_equality_is_exact_for_large_numbers_and_within_the_tolerance() -> None:
    large = Decimal("12345678901234567890")
    assert is_close(large, large, 0) and not is_close(large, large + 1, 1e-6) and is_close(large, large + 1, 1)
    assert is_close(Decimal("0.3"), Decimal("0.1") + Decimal("0.2"), 0)
    assert is_close(Decimal("3.14"), Decimal("3.14159"), 0.01) and not is_close(
        Decimal("3.1"), Decimal("3.14159"), 0.01
    )


def test_scores() -> None:
    group = [answer(text, answer="so #### 1,018") for text in ("1018", "it is 1018.0", "18", "no idea", "1018 or 3")]
    assert scores(NumericConfig(), *group) == [1, 1, 0, 0, 0]
    boxed = NumericConfig(extract=r"\\boxed\{(.*?)\}", tolerance=0.5, column="n")
    assert scores(boxed, answer(r"\boxed{4.4} 9", n=4), answer("4", n=4), answer(r"\boxed{x}", n=4)) == [1, 0, 0]


def test_a_right_answer_without_a_number_cannot_be_used(caplog: pytest.LogCaptureFixture) -> None:
    assert scores(NumericConfig(), answer("4", answer="four"), answer("4", answer=4.0)) == [None, 1]
    assert "column 'answer' has no number but 'four'" in caplog.text


@pytest.mark.parametrize("config", [NumericConfig, ExactConfig, MathConfig])
def test_a_mapping_is_no_answer_and_its_keys_are_named(config: type[ExactConfig | MathConfig | NumericConfig]) -> None:
    """A row of verl: the number of the whole mapping's text would be 2, from MATH_v2, for every row."""
    if config is MathConfig:
        pytest.importorskip("math_verify")
    row = {"reward_model": {"ground_truth": "34", "style": "rule"}, "pair": ["3", "4"], "sole": ["34"]}
    with pytest.raises(DataError, match=r"type reward\.column=reward_model\.ground_truth or reward\.col"):
        scores(config(column="reward_model"), answer("2", **row))
    with pytest.raises(DataError, match="expected text or a number, found a list"):
        scores(config(column="pair"), answer("4", **row))
    assert scores(config(column="sole"), answer("34", **row)) == [1]


@pytest.mark.parametrize("text", ['{"ground_truth": 3, "style": "v2"}', "{'answer': 2}", "[1, 2]"])
def test_no_number_is_taken_from_the_text_of_a_mapping_or_a_list(text: str) -> None:
    assert scores(NumericConfig(), answer("2", answer=text)) == [None]
