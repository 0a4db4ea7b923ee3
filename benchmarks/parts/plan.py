"""What every part is told, and how arms that train are run side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import measure
from measure import Arm

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]  # arm → one result per round


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, where, whether beside TRL, and the Python of an environment with vLLM."""

    folder: Path
    rounds: int
    threads: int
    quick: bool
    trl: bool
    vllm: str | None = None


def say(line: str) -> None:
    """Progress, beside the tables."""
    print(f"  {line}", file=sys.stderr, flush=True)


def side_by_side(arms: Sequence[Arm], plan: Plan, steps: int, batch: int, lr: float) -> dict[str, list[dict[str, Any]]]:
    """A B A B …: what each arm wrote (see `arms.stamps.write`), with the seconds of a step."""
    results: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for _ in range(plan.rounds):
        for arm in arms:
            found = _trained(arm, plan, steps, batch, lr)
            results[arm.name].append(found)
            say(f"{arm.name:40}{found['step_cpu_s']:7.3f} cpu-s{found['step_wall_s']:7.3f} s per step")
    return results


def _trained(arm: Arm, plan: Plan, steps: int, batch: int, lr: float) -> dict[str, Any]:
    file = plan.folder / "result.json"
    file.unlink(missing_ok=True)
    numbers = (str(plan.folder), str(file), str(steps), str(batch), str(lr))
    measure.command((arm.python, "-m", arm.module, *arm.options, *numbers), plan.threads, plan.folder)
    found: dict[str, Any] = json.loads(file.read_text())
    laps = {f"{name}_cpu_s": per_step(seconds) for name, seconds in found.pop("laps").items()}
    return found | laps | {"step_cpu_s": per_step(found["cpu_s"]), "step_wall_s": per_step(found["wall_s"])}


def per_step(stamps: Sequence[float]) -> float:
    """Mean seconds of the steps that count."""
    return (stamps[-1] - stamps[measure.WARM_UP - 1]) / (len(stamps) - measure.WARM_UP)


def middle(results: Sequence[Mapping[str, Any]], key: str) -> float:
    """The median over rounds."""
    return median(float(result[key]) for result in results)


def speed_up(results: Rounds, arm: str, base: str, key: str) -> list[float]:
    """How many times as fast `arm` is, by round; `key` names seconds."""
    return [float(b[key] / a[key]) for a, b in zip(results[arm], results[base], strict=True)]


def times(results: Rounds, arm: str, base: str, key: str) -> str:
    """How many times as fast `arm` is as `base`; nothing where that was not measured, or is the same."""
    return shown(speed_up(results, arm, base, key)) if base in results and arm != base else ""


def shown(ratios: Sequence[float]) -> str:
    """The median, with the rounds where there are several."""
    each = " · ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"{median(ratios):.2f} ({each})" if len(ratios) > 1 else each
