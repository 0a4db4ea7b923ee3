"""Columns are renamed all at once; what is no JSON is known."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.columns import column_value, json_type_name, nested_names
from runner.data.formats import Renaming, is_json
from runner.data.readers import Problems, Row, SourceLocation


def rename(columns: dict[str, str], *values: dict[str, Any]) -> tuple[list[Any], Renaming, str]:
    problems, renaming = Problems("data.path", "a.jsonl"), Renaming(columns)
    rows = [Row(SourceLocation("a.jsonl", i), value) for i, value in enumerate(values, 1)]
    found = [row.value for row in renaming.apply(rows, problems)]
    return found, renaming, str(problems.error()) if problems.count else ""


def test_columns_take_their_new_names_and_others_stay() -> None:
    found, renaming, message = rename({"question": "prompt", "nope": "x"}, {"question": "a", "id": 1}, {"id": 2})
    assert (found, message) == ([{"prompt": "a", "id": 1}, {"id": 2}], "")
    assert renaming.seen == {"question"}


def test_names_can_be_exchanged() -> None:
    assert rename({"a": "b", "b": "a"}, {"a": 1, "b": 2})[0] == [{"b": 1, "a": 2}]


def test_a_dotted_name_is_read_inside_an_object() -> None:
    row = {"reward_model": {"ground_truth": "4", "style": "rule"}, "a.b": 1}
    found, renaming, message = rename({"reward_model.ground_truth": "gold", "a.b": "c"}, row, {"id": 2})
    assert (found, message) == ([{"reward_model": row["reward_model"], "c": 1, "gold": "4"}, {"id": 2}], "")
    assert renaming.seen == {"reward_model.ground_truth", "a.b"}
    assert "already has `style`" in rename({"reward_model.style": "style"}, row | {"style": 1})[2]
    assert column_value(row, "reward_model.none.x") is column_value(row, "a.x") is None
    assert list(nested_names("a", {"b": {"c": 1, "d": {}}, "e": [1]})) == ["a.b.c", "a.b.d", "a.e"]
    assert json_type_name({"b": 1, "c": 2}) == "an object with the keys b, c"


def test_a_name_that_is_taken_is_a_problem_of_that_row() -> None:
    found, _, message = rename({"question": "prompt"}, {"question": "a", "prompt": "b"}, {"question": "c"})
    assert found == [{"prompt": "c"}]
    assert "a.jsonl:1: data.rename_columns renames `question` to `prompt`, but the row already has `prompt`" in message
    assert "a.jsonl:1: " in rename({"a": "b", "b": "c"}, {"a": 1, "b": 2, "c": 3})[2]


@given(st.dictionaries(st.sampled_from("abcd"), st.integers()), st.permutations("abcd"))
def test_a_permutation_of_names_loses_nothing(value: dict[str, int], names: list[str]) -> None:
    columns = dict(zip("abcd", names, strict=True))
    [found], _, message = rename(columns, value)
    assert message == ""
    assert found == {columns[name]: content for name, content in value.items()}


@pytest.mark.parametrize("value", [None, 1, 0.5, "a", True, [1, {"a": "b"}]])
def test_json_values(value: Any) -> None:
    assert is_json(value)


@pytest.mark.parametrize("value", [float("nan"), b"a", datetime.date(2024, 1, 1), [float("inf")], {"a": {1, 2}}])
def test_other_values(value: Any) -> None:
    assert not is_json(value)
