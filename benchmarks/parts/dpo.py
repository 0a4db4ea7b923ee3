"""DPO: this runner and TRL's DPOTrainer on the same pairs, with all weights and with LoRA."""

from __future__ import annotations

import math
from typing import Any

import report
from measure import TRL_VENV, Arm

from parts import plan
from parts.plan import Plan

TASKS = ("dpo", "dpo lora")
PAIRS, LR = 16, 1e-3
STEPS, QUICK_STEPS = 14, 5
FIRST_LOSS, TOLERANCE = math.log(2), 1e-4  # relative; of the losses of the first steps
COMPARED = 5
RUNNER, TRL = "this runner", "TRL DPOTrainer"


def measure(at: Plan) -> dict[str, Any]:
    """task → arm → rounds."""
    out = {}
    for task in TASKS[:1] if at.quick else TASKS:
        arms = [Arm(RUNNER, "arms.runner_cli", (task,))]
        if at.trl:
            arms.append(Arm(TRL, "arms.trl_dpo", (task,), str(TRL_VENV / "bin" / "python")))
        plan.say(task)
        out[task] = plan.side_by_side(arms, at, QUICK_STEPS if at.quick else STEPS, PAIRS, LR)
    return out


def show(measured: dict[str, Any]) -> str:
    """Pairs per second, the speed-up over TRL, and the losses."""
    rows = []
    for task, results in measured.items():
        for arm, rounds in results.items():
            rates = [f"{PAIRS / plan.middle(rounds, f'step_{clock}_s'):.1f}" for clock in ("cpu", "wall")]
            times = [plan.times(results, arm, TRL, f"step_{clock}_s") for clock in ("cpu", "wall")]
            losses = " ".join(f"{loss:.5f}" for loss in rounds[0]["losses"][:COMPARED])
            rows.append((f"{task}, {arm}", rates[0], times[0], rates[1], times[1], losses))
    head = (f"{PAIRS} pairs per step", "pairs/cpu-s", "times TRL", "pairs/s (wall)", "times TRL", "first losses")
    return report.table(head, rows)


def problems(measured: dict[str, Any]) -> list[str]:
    """Arms that do not start at log 2 or do not learn the same."""
    found = []
    for task, results in measured.items():
        wanted = next(iter(results.values()))[0]["losses"][:COMPARED]
        if not math.isclose(wanted[0], FIRST_LOSS, rel_tol=TOLERANCE):
            found.append(f"{task}: the first loss is {wanted[0]}, not log 2")
        for arm, rounds in results.items():
            for got in (one["losses"][:COMPARED] for one in rounds):
                if not _same(task, got, wanted):
                    found.append(f"{task}, {arm}: losses {got}, not {wanted}")
    return found


def _same(task: str, got: list[float], wanted: list[float]) -> bool:
    """LoRA's random matrices are each arm's own, so that only the first losses are equal."""
    count = 1 if task == "dpo lora" else len(wanted)
    return all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(got[:count], wanted[:count], strict=True))
