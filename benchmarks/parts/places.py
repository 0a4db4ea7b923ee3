"""What it costs that Ray has placed a job's processes: wall time of the same step under launch=local and launch=ray."""

from __future__ import annotations

from typing import Any

import report

from parts import jobs, plan
from parts.plan import Plan

LOCAL, RAY = "local", "ray"
WANTED = 1.05  # times a step of a second
STEPS, QUICK_STEPS = 12, 6
# On this project's two cores a step of some two seconds: two ranks, one thread each
JOB = (
    "algorithm=sft model=tiny model.hidden_size=256 model.intermediate_size=768 model.layers=4 data=demo "
    "algorithm.batch_size=256 algorithm.micro_batch_tokens=4096 parallelism=ddp launch.devices=2"
)


def measure(at: Plan) -> dict[str, Any]:
    """arm → rounds."""
    plan.say("launch=ray against launch=local")
    steps = QUICK_STEPS if at.quick else STEPS
    return jobs.side_by_side({name: f"{JOB} steps={steps} launch={name}" for name in (LOCAL, RAY)}, at)


def show(measured: dict[str, Any]) -> str:
    """Seconds of a step, and their ratio within rounds."""
    rows = []
    for name, rounds in measured.items():
        ratios = plan.speed_up(measured, LOCAL, name, "perf/step_s") if name == RAY else []
        rows.append(
            (f"launch={name}", f"{jobs.middle(rounds, 'perf/step_s'):.3f}", plan.shown(ratios) if ratios else "")
        )
    head = ("sft, 2 ranks", "step, wall s", "times local")
    return report.table(head, rows) + f"\nwanted: at most {WANTED} times a step of one second"


def problems(measured: dict[str, Any]) -> list[str]:
    """Losses that differ."""
    losses = {one["train/loss"] for rounds in measured.values() for one in rounds}
    return [f"the arms learn other things: {sorted(losses)}"] if len(losses) > 1 else []
