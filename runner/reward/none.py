"""No reward: what algorithms get that learn from given data."""

from __future__ import annotations

from typing import Any

from runner.reward.config import NoRewardConfig


def build(config: NoRewardConfig, **_: Any) -> None:
    """Nothing to build."""
