"""No sampler: what algorithms get that learn from given data."""

from __future__ import annotations

from runner.sampler.config import NoSamplerConfig


def build(config: NoSamplerConfig) -> None:
    """Nothing to build."""
