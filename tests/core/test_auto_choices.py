"""Decisions are refused under strict, facts are not; both are said once and kept apart."""

from __future__ import annotations

import logging

import pytest

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem


def test_strict_refuses_decisions_and_no_fact() -> None:
    decide = Decisions(strict=True)
    decide.record_fact("data.format", "messages", "a.jsonl: 3 items")
    decide("attention", "packed", "packed", "supported")
    with pytest.raises(EnvironmentProblem, match="attention: padded instead of packed"):
        decide("attention", "packed", "padded", "softcap")
    assert [record["feature"] for record in decide.records()["facts"]] == ["data.format", "attention"]
    assert decide.records()["decisions"] == []


def test_both_are_said_once_each_in_its_words(caplog: pytest.LogCaptureFixture) -> None:
    decide = Decisions()
    with caplog.at_level(logging.INFO, "runner"):
        for _ in range(2):
            decide.record_fact("data.format", "messages", "3 items")
            decide("device", "auto", "cpu", "no accelerator found")
    assert caplog.messages == [
        "found    data.format: messages (3 items)",
        "decided  device: cpu instead of auto (no accelerator found)",
    ]
    assert decide.records() == {
        "decisions": [{"feature": "device", "wanted": "auto", "got": "cpu", "reason": "no accelerator found"}],
        "facts": [{"feature": "data.format", "value": "messages", "reason": "3 items"}],
    }
