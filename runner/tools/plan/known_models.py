"""The shapes of well-known models, as published.yaml says them."""

from __future__ import annotations

from typing import Any

from runner.core.package import read_table

Shape = dict[str, Any]  # what `AutoConfig.for_model` takes: `model_type`, and the arguments of its config class

_TABLE = read_table(__file__, "published.yaml")
KNOWN_MODELS: dict[str, Shape] = {name: one["shape"] for one in _TABLE for name in one["names"]}
