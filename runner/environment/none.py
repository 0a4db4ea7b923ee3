"""No environment: an answer is one turn."""

from __future__ import annotations

from typing import Any

from runner.environment.config import NoEnvironmentConfig


def build(config: NoEnvironmentConfig, **_: Any) -> None:
    """Nothing to build."""
