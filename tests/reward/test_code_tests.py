"""Tests of code in the forms of other projects, and how printed numbers and blanks are compared."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from runner.interfaces.rewards import UnscorableError
from runner.reward.code_tests import Assertions, CallTests, ProgramTests, parse_tests, prints_same

CASES = [{"input": "1 2", "output": "3", "testtype": "stdin"}]


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, ProgramTests(("1 2\n",), ("3\n",))),
        ({"inputs": ["1 2\n"], "outputs": [3], "fn_name": None}, ProgramTests(("1 2\n",), ("3",))),
        ({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}, ProgramTests(("1\n2",), ("3\n4",))),
        (CASES, ProgramTests(("1 2",), ("3",), exact=True)),
        ({"public_test_cases": json.dumps(CASES)}, ProgramTests(("1 2",), ("3",), exact=True)),
        (
            {"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"},
            CallTests("f", ([1, [2]],), ([3],), wrapped=True),
        ),
        ({"inputs": ["1\n[2]"], "outputs": ["3"], "fn_name": "f"}, CallTests("f", ([1, [2]],), (3,), wrapped=True)),
        (
            [{"input": "1\n[2]", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}],
            CallTests("f", ([1, [2]],), (3,)),
        ),
        (["assert f(1)", "assert f(2)"], Assertions("assert f(1)\nassert f(2)")),
    ],
)
def test_each_form_is_the_same_as_a_value_and_as_json(value: Any, tests: Any) -> None:
    assert parse_tests(value) == parse_tests(json.dumps(value)) == tests


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "equally many"),
        ({"inputs": ["1"], "outputs": [" \n"]}, "assert nothing"),
        ({"inputs": [{"a": 1}], "outputs": ["1"]}, "is text"),
        ({"inputs": ["1"], "outputs": [True]}, "is text"),
        ({"inputs": ["1"], "outputs": ["1"], "checker": "int main()"}, "unknown key 'checker'.*fn_name"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "is JSON"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": ["f"]}, "name of a function"),
        ([{"input": "1", "output": "1"}], "keys input, output; known are"),
        ([CASES[0], CASES[0] | {"testtype": "functional"}], "testtype stdin, or all of functional"),
        ([CASES[0] | {"testtype": "functional"}], "metadata with func_name"),
        ("SELECT 1;", "neither JSON nor Python"),
        ("", "expected Python code"),
        ([], "expected Python code"),
        (7, "expected Python code"),
    ],
)
def test_a_form_that_is_not_known_is_an_error_of_the_row(value: Any, message: str) -> None:
    with pytest.raises(UnscorableError, match=message):
        parse_tests(value)


def test_compressed_tests_of_livecodebench_are_not_unpickled() -> None:
    class Mine:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was unpickled",)

    for content in (json.dumps(CASES), Mine()):
        text = base64.b64encode(zlib.compress(pickle.dumps(content))).decode()
        with pytest.raises(UnscorableError, match=r"a pickle, which can run code.*\n.*convert them once"):
            parse_tests(text)


@pytest.mark.parametrize(
    ("printed", "wanted", "loose", "exact"),
    [
        ("3\n", "3", True, True),
        ("  3 4 \n\n", "3   4", True, True),
        ("3\n\n4", "3\n4", True, False),
        ("3 4", "3\n4", False, False),
        ("4 3", "3 4", False, False),
        ("1.0", "1", True, True),
        ("1.50", "1.5", True, True),
        ("0.333333333", "0.3333333333", True, False),
        ("0.3334", "0.3333", False, False),
        ("3.0000001", "3", True, False),
        ("50000000000000001", "50000000000000000", False, False),
        ("1e3", "1000", True, True),
        ("YES", "Yes", False, False),
        ("nan", "nan", True, True),
        ("nan", "1", False, False),
        ("1e999999999", "1", False, False),
        ("", "1", False, False),
    ],
)
def test_blanks_and_numbers_are_compared_as_apps_and_livecodebench_do(
    printed: str, wanted: str, loose: bool, exact: bool
) -> None:
    assert (prints_same(printed, wanted, exact=False), prints_same(printed, wanted, exact=True)) == (loose, exact)


def test_a_list_of_one_value_is_the_value_in_apps_and_not_in_livecodebench() -> None:
    assert CallTests("f", ([1],), ([3],), wrapped=True).accepts([3])
    assert not CallTests("f", ([1],), ([3],)).accepts([3])
    assert not CallTests("f", ([1],), ([3, 4],), wrapped=True).accepts([3])
    assert not CallTests("f", ([1],), (3,)).accepts([])
