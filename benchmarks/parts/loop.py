"""The loop's own share of a step: everything beside collecting, preparing, learning and stepping."""

from __future__ import annotations

import json
import sys
from typing import Any

import measure as harness
import report

from parts import plan
from parts.plan import Plan

STEPS, QUICK_STEPS = 30, 8
SWITCHED_OFF = (
    "evaluation.every=0",
    "checkpoint.every=0",
    "checkpoint.export=false",
    "checkpoint.best=null",
    "device=cpu",
)
LARGER = ("model.hidden_size=256", "model.intermediate_size=768")
CASES = {
    "sft, 1 M parameters, 8 conversations": ("+recipe=sft_demo", "algorithm.batch_size=8"),
    "sft, 1 M parameters, 64 conversations": ("+recipe=sft_demo",),
    "sft, 4 M parameters, 64 conversations": ("+recipe=sft_demo", *LARGER),
    "grpo, 1 M parameters, 64 prompts of 8 answers": ("+recipe=grpo_demo", "init_from=null"),
    "grpo, 4 M parameters, 64 prompts of 8 answers": ("+recipe=grpo_demo", "init_from=null", *LARGER),
}


def measure(at: Plan) -> dict[str, Any]:
    """case → rounds. Trackers, screen and records are as they are by default."""
    cases = list(CASES)[:1] if at.quick else CASES
    out: dict[str, Any] = {case: [] for case in cases}
    file = at.folder / "loop.json"
    steps = QUICK_STEPS if at.quick else STEPS
    for _ in range(at.rounds):
        for case in cases:
            typed = (*CASES[case], *SWITCHED_OFF, f"device.threads={at.threads}", f"steps={steps}")
            harness.command((sys.executable, "-m", "arms.overhead", str(file), *typed), at.threads, at.folder)
            out[case].append(json.loads(file.read_text()))
        plan.say("the loop's own time")
    return out


def show(measured: dict[str, Any]) -> str:
    """Milliseconds of the loop, and their share of a step."""
    rows = []
    for case, rounds in measured.items():
        step, own = (plan.middle(rounds, f"{name}_cpu_s") for name in ("step", "own"))
        rows.append((case, f"{step * 1e3:.0f}", f"{own * 1e3:.2f}", f"{own / step:.2%}"))
    return report.table(("the loop's own time", "step, cpu-ms", "loop, cpu-ms", "share"), rows)


def problems(measured: dict[str, Any]) -> list[str]:
    """Nothing here can be wrong, only slow."""
    return []
