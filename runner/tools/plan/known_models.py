"""The shapes of well-known models, as published.yaml says them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Shape = dict[str, Any]  # what `AutoConfig.for_model` takes: `model_type`, and the arguments of its config class

_TABLE = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
KNOWN_MODELS: dict[str, Shape] = {name: one["shape"] for one in _TABLE for name in one["names"]}
