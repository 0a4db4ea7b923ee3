"""Arithmetic expressions of given numbers."""

from __future__ import annotations

import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.reward.config import CountdownConfig
from runner.reward.rules import evaluate_expression, solves
from tests.reward.samples import answer, scores


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1+2*3", 7),
        ("(1+2)*3 = 9", 9),
        ("1/3 + 2/3", 1),
        ("-(2-5)", 3),
        ("6 ÷ 2 × 5 − 1", 14),
        ("2**3", None),
        ("7//2", None),
        ("1/(2-2)", None),
        ("1 2", None),
        ("2(3)", None),
        ("(1+2", None),
        ("007", None),
        ("", None),
        ("__import__('os').abort()", None),
        ("1.5*2", None),
        ("(" * 150 + "1" + ")" * 149, None),
        ("(" * 10_000, None),
    ],
)
def test_values(expression: str, result: int | None) -> None:
    found = evaluate_expression(expression)
    assert (None if found is None else found[0]) == result


trees = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
    max_leaves=12,
)


@given(trees)
def test_a_value_is_what_python_computes_with_fractions(expression: str) -> None:
    numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in expression).split()]
    as_fractions = "".join(f"F({part})" if part.isdigit() else part for part in _tokens(expression))
    try:
        expected = eval(as_fractions, {"F": Fraction})  # the reference computation
    except ZeroDivisionError:
        assert evaluate_expression(expression) is None
        return
    assert evaluate_expression(expression) == (expected, numbers)
    assert solves(expression, numbers[::-1], expected)
    assert not solves(expression, [*numbers, 7], expected) and solves(
        expression, [*numbers, 7], expected, use_all=False
    )
    assert not solves(expression, numbers[1:], expected, use_all=False)


def _tokens(expression: str) -> list[str]:
    return "".join(c if c.isdigit() else f" {c} " for c in expression).split()


def test_nothing_grows_without_bound() -> None:
    assert evaluate_expression("9" * 300) is not None and sys.getrecursionlimit() >= 500
    assert evaluate_expression("-" * 250 + "1") == (1, [1])


def test_scores(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"numbers": [2, 3, 7], "target": 13}
    texts = ("2*3+7", "(7+2*3) = 13", "7+3+3", "6+7", "<answer>2*3+7</answer>")
    assert scores(CountdownConfig(), *(answer(t, **columns) for t in texts)) == [1, 1, 0, 0, 0]
    tagged = CountdownConfig(extract="<answer>(.*?)</answer>", use_all=False)
    assert scores(tagged, answer("so <answer>7+3*2</answer>", **columns), answer("7+6", **columns)) == [1, 0]
    unusable = [answer("1", numbers="2 3", target=1), answer("1", numbers=[1.5], target=1), answer("1", target=1)]
    assert scores(CountdownConfig(), *unusable, answer("1", numbers=[1], target=1)) == [None, None, None, 1]
    assert "column 'numbers' has no list of integers but 2 3" in caplog.text
