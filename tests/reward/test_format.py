"""The form of the whole text."""

from __future__ import annotations

import pytest

from runner.reward import rules
from runner.reward.config import FormatConfig
from tests.reward.samples import answer, scores


def test_the_whole_text_has_to_match() -> None:
    config = FormatConfig(pattern="<think>.*</think>\n<answer>.*</answer>")
    good = "<think>\n2 and 2\n</think>\n<answer>4</answer>"
    assert scores(config, answer(good), answer(good + "."), answer("4"), answer("")) == [1, 0, 0, 0]


def test_a_text_that_takes_too_long_has_no_score(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rules, "SEARCH_S", 0.05)
    assert scores(FormatConfig(pattern="(?:a|aa)+[bc]"), answer("a" * 5000), answer("ab")) == [None, 1]
    assert "simplify it" in caplog.text


def test_a_broken_pattern_is_a_problem_of_the_spec() -> None:
    [(key, message)] = FormatConfig(pattern="(").problems(None)
    assert key == "reward.pattern" and "not a regular expression" in message
