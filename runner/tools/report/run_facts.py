"""What a run folder says of a run: its metrics as series, spec, state, code, versions, device and
decisions. Nothing here needs torch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.run_dir.folder import RunFolder, read_mapping, read_spec
from runner.run_dir.manifest import redact_values
from runner.tracker.jsonl import complete_lines
from runner.tracker.text import METRICS

log = logging.getLogger("runner")

PREFERRED: list[str] = METRICS["preferred"]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run: (step, value) in order; what is not finite is left out.

    lost: the steps whose value is not finite
    """

    points: tuple[tuple[int, float], ...]
    lost: tuple[int, ...] = ()

    @property
    def by_step(self) -> dict[int, float]:
        """The value of every step that measured it: NaN, where that is not finite."""
        return dict(self.points) | dict.fromkeys(self.lost, math.nan)

    @property
    def last(self) -> tuple[int, float]:
        """The newest step that measured it, and the value: NaN, where that is not finite."""
        return max(self.by_step.items(), key=lambda point: point[0])

    def best(self, mode: str) -> tuple[int, float]:
        """The step with the best value, the earliest of equals; what is not finite is no value."""
        sign = -1.0 if mode == "max" else 1.0
        return min(self.points, key=lambda point: (sign * point[1], point[0]))

    def smooth(self, weight: float) -> Series:
        """Debiased exponential moving average (Adam, 1412.6980); `weight` is that of the past."""
        mean, points = 0.0, []
        for count, (step, value) in enumerate(self.points, 1):
            mean = weight * mean + (1 - weight) * value
            points.append((step, mean / (1 - weight**count)))
        return Series(tuple(points))

    def downsample(self, most: int) -> Series:
        """At most about `most` points: means of neighbors, at the last step of each group."""
        if len(self.points) <= most:
            return self
        size = math.ceil(len(self.points) / most)
        groups = [self.points[i : i + size] for i in range(0, len(self.points), size)]
        return Series(tuple((group[-1][0], math.fsum(v for _, v in group) / len(group)) for group in groups))


def read_metrics(path: Path) -> dict[str, Series]:
    """Every metric of a metrics.jsonl; empty where there is none yet.

    A last line without its newline is still being written, or torn, and left out; any other damaged line is named.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    lost: dict[str, list[int]] = {}
    for row in read_rows(path, step=int):
        step = row.pop("step")
        for name, value in row.items():
            is_finite = isinstance(value, int | float) and math.isfinite(value)
            if is_finite:
                found.setdefault(name, []).append((step, float(value)))
            else:
                lost.setdefault(name, []).append(step)
    return {name: Series(tuple(points), tuple(lost.get(name, ()))) for name, points in found.items()}


def read_rows(path: Path, *keys: str, **types: Callable[[Any], Any]) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; none where there is no file.

    keys, types: keys that each row must have, some with a type. A last line without its newline is left out; one that
    is damaged, or lacks such a key, is named and left out.
    """
    for number, line in enumerate(complete_lines(path), 1):
        try:
            row = dict(json.loads(line))
            if missing := [key for key in (*keys, *types) if key not in row]:
                raise ValueError(f"it has no {missing[0]}")
            row |= {key: make(row[key]) for key, make in types.items()}
        except (ValueError, TypeError) as error:
            log.warning("%s: line %d is damaged and skipped (%s)", path, number, error)
        else:
            yield row


SHOWN_PACKAGES = ("torch", "torch-npu", "transformers", "peft", "datasets", "vllm", "posttrain-run")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run as its folder tells it; what is missing is empty."""

    folder: RunFolder
    spec: Mapping[str, Any]
    set_by: Mapping[str, str]
    typed: tuple[str, ...]
    status: Mapping[str, Any]
    manifest: Mapping[str, Any]
    data: str  # the fingerprint of its data, from its newest checkpoint; empty before there is one
    series: Mapping[str, Series]
    evaluations: tuple[Mapping[str, Any], ...] = ()  # by `run eval`, oldest first

    @property
    def newest_evaluations(self) -> dict[str, Mapping[str, Any]]:
        """SET → the newest record of `run eval` that has the set."""
        return {name.partition("/")[0]: one for one in self.evaluations for name in one["values"]}

    @property
    def environment(self) -> dict[str, str]:
        """What it was made of, one line each: code, versions, device."""
        made, code = self.manifest, self.manifest.get("code", {})
        commit = code.get("commit") or code.get("reason") or "not known"
        lines = {
            "code": f"{commit}{' with uncommitted changes' if code.get('dirty') else ''}",
            "branch": str(code.get("branch") or ""),
            "python": str(made.get("python", {}).get("version", "")),
            "machine": str(made.get("platform", {}).get("system", "")),
            "device": ", ".join(f"{k} {v}" for k, v in made.get("device", {}).items()),
        }
        lines |= {name: made.get("packages", {}).get(name, "") for name in SHOWN_PACKAGES}
        lines |= made.get("environment", {})
        return {name: str(value) for name, value in lines.items() if value}


def read_run(folder: RunFolder) -> RunFacts:
    """All facts of a run, secrets masked. Raises EnvironmentProblem where its spec cannot be read."""
    spec = read_spec(folder).data
    overrides = read_mapping(folder.overrides)
    return RunFacts(
        folder,
        redact_values(spec),
        overrides.get("set_by", {}),
        tuple(redact_values(overrides.get("typed", []))),
        read_mapping(folder.status),
        read_mapping(folder.manifest),
        _fingerprint(folder),
        read_metrics(folder.metrics),
        tuple(read_rows(folder.evaluations, "step", "created", values=dict)),
    )


def _fingerprint(folder: RunFolder) -> str:
    newest = max(folder.checkpoints.glob("step-*/state.json"), default=None)
    identity = read_mapping(newest).get("identity", {}) if newest is not None else {}
    return str(identity.get("data", "")) if isinstance(identity, dict) else ""
