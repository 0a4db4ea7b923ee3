"""The metrics of a run as series, read from its metrics.jsonl."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("runner")

# Which metric ranks or is shown first, where nobody said: held-out before rewards before the training loss.
PREFERRED = ("eval/exact_match", "eval/accuracy", "eval/loss", "reward/mean", "train/loss")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run: (step, value) in order; what is not finite is left out.

    lost: the newest step that measured it, where the value there is not finite
    """

    points: tuple[tuple[int, float], ...]
    lost: int | None = None

    @property
    def last(self) -> tuple[int, float]:
        """The newest step that measured it, and the value: NaN, where that is not finite."""
        return self.points[-1] if self.lost is None else (self.lost, math.nan)

    def best(self, mode: str) -> tuple[int, float]:
        """The step with the best value, the earliest of equals; what is not finite is no value."""
        sign = -1.0 if mode == "max" else 1.0
        return min(self.points, key=lambda point: (sign * point[1], point[0]))

    def thinned(self, most: int) -> Series:
        """At most about `most` points: means of neighbours, at the last step of each group."""
        if len(self.points) <= most:
            return self
        size = math.ceil(len(self.points) / most)
        groups = [self.points[i : i + size] for i in range(0, len(self.points), size)]
        return Series(tuple((group[-1][0], math.fsum(v for _, v in group) / len(group)) for group in groups))


def read(path: Path) -> dict[str, Series]:
    """Every metric of a metrics.jsonl; empty where there is none yet.

    A last line without its newline is still being written, or torn, and left out; any other damaged line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    found: dict[str, list[tuple[int, float]]] = {}
    lost: dict[str, int | None] = {}
    for number, line in enumerate(lines, 1):
        if line.endswith("\n"):
            try:
                row = json.loads(line)
                step = int(row.pop("step"))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                log.warning("%s: line %d is damaged and left out (%s)", path, number, error)
                continue
            for name, value in row.items():
                is_finite = isinstance(value, int | float) and math.isfinite(value)
                lost[name] = None if is_finite else step
                if is_finite:
                    found.setdefault(name, []).append((step, float(value)))
    return {name: Series(tuple(points), lost[name]) for name, points in found.items()}
