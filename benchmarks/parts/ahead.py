"""Sampling ahead of training: wall time of a GRPO step at lag 0 and at lag 1, where two threads may run at once."""

from __future__ import annotations

import os
from typing import Any

import report
from measure import WARM_UP, Arm

from parts import plan
from parts.plan import Plan

CASE, PROMPTS, LR = "lengths differ", 8, 1e-6
STEPS, QUICK_STEPS = 14, 5
ON, AHEAD = "lag 0", "lag 1"


def measure(at: Plan) -> dict[str, Any]:
    """arm → rounds."""
    plan.say(f"sampling ahead, {len(os.sched_getaffinity(0))} cores")
    arms = [Arm(name, "arms.runner_cli", (CASE, f"algorithm.lag={lag}")) for lag, name in enumerate((ON, AHEAD))]
    return plan.side_by_side(arms, at, QUICK_STEPS if at.quick else STEPS, PROMPTS, LR)


def show(measured: dict[str, Any]) -> str:
    """Wall seconds of a step, how long it waits for its samples, and the share of the sampling that costs no time."""
    found = {name: [_means(one) for one in rounds] for name, rounds in measured.items()}
    on = {key: plan.middle(found[ON], key) for key in ("wall_s", "waited_s")}
    rows = []
    for name, rounds in found.items():
        step, waited, cpu = (plan.middle(rounds, key) for key in ("wall_s", "waited_s", "cpu_s"))
        hidden = f"{(on['wall_s'] - step) / on['waited_s']:.0%}" if name == AHEAD else ""
        rows.append((name, *(f"{seconds:.3f}" for seconds in (step, waited, step - waited, cpu)), hidden))
    head = (f"grpo, {CASE}, {len(os.sched_getaffinity(0))} cores", "step, wall s", "waits for samples", "trains")
    times = plan.shown(plan.speed_up(found, AHEAD, ON, "wall_s"))
    return report.table((*head, "step, cpu-s", "sampling hidden"), rows) + f"\nlag 1 is {times} times as fast as lag 0"


def _means(one: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step; not of the last one, beside which nothing is sampled any more."""
    waits = one["collect_s"][WARM_UP:-1]
    clocks = {clock: plan.per_step(one[clock][:-1]) for clock in ("wall_s", "cpu_s")}
    return {"waited_s": sum(waits) / len(waits), **clocks}


def problems(measured: dict[str, Any]) -> list[str]:
    """Nothing here can be wrong, only slow."""
    return []
