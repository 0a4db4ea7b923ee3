"""GRPO: this runner and TRL's GRPOTrainer on the same prompts with the same reward, and where a step's time goes."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

import report
from arms.preferences import GRPO
from measure import TRL_VENV, WARM_UP, Arm

from parts import plan
from parts.plan import Plan

LR = 1e-6  # so small that all steps of all arms sample from the same distribution
STEPS, QUICK_STEPS = 8, 4
QUICK = ("lengths differ",)
RUNNER, TRL, PAGED = "this runner", "TRL GRPOTrainer", "TRL, continuous batching"
PARTS = ("sampling", "scoring")
MOST_ERRORS = 5.0  # standard errors between the means of two arms


def measure(at: Plan) -> dict[str, Any]:
    """case → arm → rounds."""
    out = {}
    for case in QUICK if at.quick else GRPO:
        arms = [Arm(RUNNER, "arms.runner_cli", (case,))]
        if at.trl:
            python = str(TRL_VENV / "bin" / "python")
            arms += [Arm(TRL, "arms.trl_grpo", (case, "padded"), python)]
            arms += [Arm(PAGED, "arms.trl_grpo", (case, "paged"), python)] if not at.quick else []
        plan.say(f"grpo, {case}")
        out[case] = plan.side_by_side(arms, at, QUICK_STEPS if at.quick else STEPS, GRPO[case].prompts, LR)
    return out


def show(measured: dict[str, Any]) -> str:
    """Answers and tokens per second, the speed-up over TRL, and the split of a step."""
    rows = []
    for case, results in measured.items():
        how = GRPO[case]
        for arm, rounds in results.items():
            step, wall = (plan.middle(rounds, f"step_{clock}_s") for clock in ("cpu", "wall"))
            parts = [plan.middle(rounds, f"{part}_cpu_s") for part in PARTS]
            tokens = mean(mean(one["tokens"][WARM_UP:]) for one in rounds)
            rows.append(
                (
                    f"{case}, {arm}",
                    f"{how.answers / step:.1f}",
                    plan.times(results, arm, TRL, "step_cpu_s"),
                    f"{how.answers / wall:.1f}",
                    plan.times(results, arm, TRL, "step_wall_s"),
                    f"{tokens:.0f}",
                    *(f"{seconds:.3f}" for seconds in (*parts, step - sum(parts))),
                )
            )
    head = ("grpo", "answers/cpu-s", "times TRL", "answers/s (wall)", "times TRL", "tokens per step")
    return report.table((*head, "sampling cpu-s", "scoring", "training and rest"), rows)


def problems(measured: dict[str, Any]) -> list[str]:
    """Arms whose answers are not as long, or not worth as much, as those of the first arm."""
    found = []
    for case, results in measured.items():
        first, *others = results
        for arm in others:
            for name in ("tokens", "rewards"):
                ours, theirs = (results[one][0][name] for one in (first, arm))  # another round draws the same
                if _errors_apart(ours, theirs) > MOST_ERRORS:
                    found.append(f"{case}: {name} per step are {mean(ours):.4g} ({first}), {mean(theirs):.4g} ({arm})")
    return found


def _errors_apart(a: list[float], b: list[float]) -> float:
    """How many standard errors the means lie apart; of two constants 0 or infinitely many."""
    error = math.hypot(stdev(a) / math.sqrt(len(a)), stdev(b) / math.sqrt(len(b)))
    difference = abs(mean(a) - mean(b))
    return difference / error if error else math.inf if difference else 0.0
