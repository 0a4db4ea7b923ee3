"""Which parameters are decayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def decay_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices (and higher) are decayed, vectors (biases, norms) are not; the order of names is kept."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
