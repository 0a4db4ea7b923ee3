"""Sampling beside training, on devices of its own: how much of the overlap that is possible a job reaches.

Generation and training take the times that they are told, waiting as for a device, without a core; everything else is
real: processes, HTTP, files of weights, the probe, the real answers of a tiny model, the loop.
"""

from __future__ import annotations

from typing import Any

import report

from parts import jobs, plan
from parts.plan import Plan

HERE, OWN, AHEAD = "the rank samples, lag 0", "a sampler of its own, lag 0", "a sampler of its own, lag 1"
TIMES = {"equal": (2.0, 2.0), "generation is longer": (3.0, 1.5)}  # seconds of generation, of training
WANTED = 0.9
STEPS, QUICK_STEPS = 12, 7
JOB = (
    "algorithm=grpo model=tiny model.layers=1 data=demo sampler=simulated sampler.max_new_tokens=8 reward=rehearsal "
    "algorithm.batch_size=4 algorithm.group_size=4 optimizer=simulated"
)


def measure(at: Plan) -> dict[str, Any]:
    """Case → arm → rounds."""
    steps = QUICK_STEPS if at.quick else STEPS
    found = {}
    for name in list(TIMES)[: 1 if at.quick else None]:
        generation, training = TIMES[name]
        plan.say(f"overlap, {name}: {generation} s of generation, {training} s of training")
        job = f"{JOB} steps={steps} sampler.seconds={generation} optimizer.seconds={training}"
        arms = {HERE: job, OWN: f"{job} launch.samplers=1", AHEAD: f"{job} launch.samplers=1 algorithm.lag=1"}
        found[name] = jobs.side_by_side(arms, at)
    return found


def show(measured: dict[str, Any]) -> str:
    """Seconds of a step, what is lost beside the times given, and the share of the overlap that is reached."""
    rows = []
    for name, arms in measured.items():
        generation, training = TIMES[name]
        for arm, rounds in arms.items():
            ideal = max(generation, training) if arm == AHEAD else generation + training
            step = jobs.middle(rounds, "perf/step_s")
            share = plan.shown(reached(name, rounds)) if arm == AHEAD else ""
            rows.append((f"{name}: {arm}", f"{ideal:.2f}", f"{step:.3f}", share))
    return report.table(("generation and training", "ideal s", "step, wall s", "overlap reached"), rows)


def reached(name: str, rounds: list[dict[str, float]]) -> list[float]:
    """Of the time that both could run at once, the share by which a step is shorter than one after the other, by round:
    what HTTP, weights and the loop cost counts against it."""
    return [(sum(TIMES[name]) - one["perf/step_s"]) / min(TIMES[name]) for one in rounds]


def problems(measured: dict[str, Any]) -> list[str]:
    """Nothing here can be wrong, only slow."""
    return []
