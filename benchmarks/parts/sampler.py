"""Sampling: this runner's sampler, transformers' `generate`, and its continuous batching, turn by turn.

Random models of 1 and 4 million parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import measure as harness
import report
from arms.sampler import CASES, SIZES

from parts import plan
from parts.plan import Plan

QUICK = ("1 at once", "8 at once")  # of the smaller model
LARGEST_DIFFERENCE = 1e-4  # of logprobs, in nats
ARMS = ("runner", "generate", "continuous")
HEAD = (
    "model, answers",
    "tokens/cpu-s",
    "generate",
    "continuous",
    "times generate",
    "times continuous",
    "of its forwards",
    "generate's",
    "continuous's",
)


def measure(at: Plan) -> list[dict[str, Any]]:
    """All cases, one after another, each with all of its rounds in a process of its own."""
    cases = [(size, case) for size in SIZES for case in CASES]
    if at.quick:
        cases = [(next(iter(SIZES)), case) for case in QUICK]
    return [_one(size, case, at) for size, case in cases]


def _one(size: str, case: str, at: Plan) -> dict[str, Any]:
    file = at.folder / "sampler.json"
    arms = ",".join(ARMS[:2] if at.quick else ARMS)
    harness.command(
        (sys.executable, "-m", "arms.sampler", str(file), size, case, str(at.rounds), arms), at.threads, at.folder
    )
    measured: dict[str, Any] = json.loads(file.read_text())
    plan.say(f"{size}, {case}")
    return {"size": size, "case": case, **measured}


def rate(arm: Mapping[str, float]) -> float:
    """Tokens per processor second."""
    return arm["tokens"] / arm["cpu_s"]


def show(measured: list[dict[str, Any]]) -> str:
    """Tokens per second, ratios within rounds, and each arm's processor time over that of its forward passes."""
    return report.table(HEAD, [_line(one) for one in measured])


def _line(measured: Mapping[str, Any]) -> tuple[str, ...]:
    rounds = measured["rounds"]
    arms = [arm for arm in ARMS if arm in rounds[0]]
    none = [""] * (len(ARMS) - len(arms))
    return (
        f"{measured['size']}, {measured['case']}",
        *(f"{median(rate(r[arm]) for r in rounds):.0f}" for arm in arms),
        *none,
        *(f"{median(rate(r['runner']) / rate(r[arm]) for r in rounds):.2f}" for arm in arms[1:]),
        *none,
        *(f"{median(r[arm]['cpu_s'] / r[arm]['forward_cpu_s'] for r in rounds):.2f}" for arm in arms),
        *none,
    )


def problems(measured: list[dict[str, Any]]) -> list[str]:
    """Cases whose reported logprobs are not the model's."""
    return [
        f"{m['size']}, {m['case']}: a reported logprob is off by {m['worst_logprob']:.1e}"
        for m in measured
        if not m["worst_logprob"] <= LARGEST_DIFFERENCE
    ]
