"""Which checkpoints stay: the newest few and the best one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from runner.checkpoint.config import direction
from runner.errors import Problem, SpecError


def best_step(metrics: Mapping[int, Mapping[str, float]], name: str, mode: str | None) -> int | None:
    """The step with the best value of `name`; of equal ones the oldest, None where none has it yet.

    mode: max, min, or None = as its name says, and max for a name that says nothing, which no decoded spec has.
    Raises SpecError if the job does not measure it.
    """
    _refuse_unmeasured(name, metrics)
    sign = 1.0 if (mode or direction(name)) != "min" else -1.0
    scores = {s: sign * m[name] for s, m in metrics.items() if not math.isnan(m.get(name, math.nan))}
    return min(scores, key=lambda s: (-scores[s], s), default=None)


def kept(steps: Collection[int], keep: int, best: int | None) -> set[int]:
    """The newest `keep` of `steps`, and the best."""
    return set(sorted(steps)[-keep:]) | ({best} if best is not None else set())


def _refuse_unmeasured(name: str, metrics: Mapping[int, Mapping[str, float]]) -> None:
    """Raise SpecError if the newest step with an evaluation has no `name`."""
    evaluated = [step for step, values in metrics.items() if any(key.startswith("eval/") for key in values)]
    if evaluated and name not in (newest := metrics[max(evaluated)]):
        known = ", ".join(sorted(key for key in newest if key.startswith(("eval/", "train/", "reward/"))))
        raise SpecError([Problem("checkpoint.best", f"{name} is not measured; this job measures {known}")])
