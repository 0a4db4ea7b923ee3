"""Which parameters are decayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def decay_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices (and higher) are decayed, vectors (biases, norms) are not; the order of names is kept.

    Parameters on `meta`, which other ranks have, are left out; the groups are as many as if they were there.
    """
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [(group, decay) for group, decay in ((matrices, weight_decay), (vectors, 0.0)) if group]
    return [{"params": [p for p in group if not p.is_meta], "weight_decay": decay} for group, decay in groups]
