"""Whether the text has the wanted form."""

from __future__ import annotations

from typing import Any

from runner.reward.config import FormatConfig
from runner.reward.faults import Faults
from runner.reward.patterns import matches
from runner.reward.scorer import Scorer, each


def build(config: FormatConfig, **_: Any) -> Scorer:
    """The reward: 1 where `pattern` matches the whole text, else 0."""
    ask = each(lambda completion: float(matches(config.pattern, completion.text)))
    return Scorer(ask, Faults("reward=format", config.max_failures, "simplify reward.pattern"))
