"""Exact match of the answer with a column of the data."""

from __future__ import annotations

from typing import Any

from runner.interfaces import Completion
from runner.reward.config import ExactConfig
from runner.reward.faults import Faults
from runner.reward.patterns import last
from runner.reward.scorer import Scorer, column, each


def equal(answer: str, wanted: str, ignore_case: bool = False) -> bool:
    """Whether two texts are the same but for blanks around them."""
    a, b = answer.strip(), wanted.strip()
    return a.casefold() == b.casefold() if ignore_case else a == b


def build(config: ExactConfig, **_: Any) -> Scorer:
    """The reward; an answer in which `extract` finds nothing scores 0."""

    def rate(completion: Completion) -> float:
        wanted = str(column(completion, config.column, "column"))
        answer = completion.text if config.extract is None else last(config.extract, completion.text)
        return float(answer is not None and equal(answer, wanted, config.ignore_case))

    return Scorer(each(rate), Faults("reward=exact", config.max_failures, "set reward.column to a column of the data"))
