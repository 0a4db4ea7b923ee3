"""Which checkpoints stay: the newest few and the best one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


def best_step(metrics: Mapping[int, Mapping[str, float]], name: str, mode: str) -> int | None:
    """The step with the best value of `name` (mode max or min); of equal ones the oldest, None where none has it."""
    sign = 1.0 if mode == "max" else -1.0
    scores = {s: sign * m[name] for s, m in metrics.items() if not math.isnan(m.get(name, math.nan))}
    return min(scores, key=lambda s: (-scores[s], s), default=None)


def kept(steps: Collection[int], keep: int, best: int | None) -> set[int]:
    """The newest `keep` of `steps`, and the best."""
    return set(sorted(steps)[-keep:]) | ({best} if best is not None else set())
