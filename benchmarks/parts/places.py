"""What it costs that Ray has placed a job's processes: wall time of the same step under launch=local and launch=ray."""

from __future__ import annotations

from typing import Any

import report

from parts import jobs, plan
from parts.plan import Plan

LOCAL, RAY = "local", "ray"
WANTED = 1.05  # times a step of a second
STEPS, QUICK_STEPS = 12, 6
# A step of a second or two on this project's two cores. Ray's own processes need some of a core: on as many ranks as
# cores they take it from these, which no node with accelerators does.
JOB = (
    "algorithm=sft model=tiny model.hidden_size=256 model.intermediate_size=768 model.layers=4 data=demo "
    "algorithm.batch_size=128 algorithm.micro_batch_tokens=4096"
)
JOBS = {
    "1 rank, a core to spare": JOB,
    "2 ranks, no core to spare": f"{JOB} parallelism=ddp launch.devices=2",
}


def measure(at: Plan) -> dict[str, Any]:
    """layout → arm → rounds."""
    steps = QUICK_STEPS if at.quick else STEPS
    found = {}
    for layout, job in JOBS.items():
        plan.say(f"launch=ray against launch=local, {layout}")
        found[layout] = jobs.side_by_side({name: f"{job} steps={steps} launch={name}" for name in (LOCAL, RAY)}, at)
    return found


def show(measured: dict[str, Any]) -> str:
    """Seconds of a step, and their ratio within rounds."""
    rows = []
    for layout, arms in measured.items():
        for name, rounds in arms.items():
            ratios = plan.speed_up(arms, LOCAL, name, "perf/step_s") if name == RAY else []
            step = f"{jobs.middle(rounds, 'perf/step_s'):.3f}"
            rows.append((layout, f"launch={name}", step, plan.shown(ratios) if ratios else ""))
    head = ("sft", "", "step, wall s", "times local")
    return report.table(head, rows) + f"\nwanted: at most {WANTED} times a step of one second, with a core to spare"


def problems(measured: dict[str, Any]) -> list[str]:
    """Losses that differ."""
    found = []
    for layout, arms in measured.items():
        losses = {one["train/loss"] for rounds in arms.values() for one in rounds}
        found += [f"{layout}: the arms learn other things: {sorted(losses)}"] if len(losses) > 1 else []
    return found
