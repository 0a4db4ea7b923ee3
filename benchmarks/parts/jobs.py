"""Whole jobs, as a user would type them, in turn; the numbers are those of their own metrics.jsonl."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import measure as harness

from parts import plan
from parts.plan import Plan

WARM_UP = 2  # steps that do not count, and the last one, beside which nothing is sampled ahead
SIMULATED = harness.HERE / "simulated"  # a package with components that take as long as they are told
QUIET = ("tracker=none", "evaluation.every=0", "checkpoint.every=0", "checkpoint.export=false", "device=cpu")


def side_by_side(arms: Mapping[str, str], at: Plan, python: str = sys.executable) -> dict[str, list[dict[str, float]]]:
    """A B A B …: arm → the medians over the steps of each round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(at.rounds):
        for name, words in arms.items():
            found[name].append(one(words.split(), at, python))
            plan.say(f"{name:40}{found[name][-1]['perf/step_s']:7.3f} s per step")
    return found


def one(words: Sequence[str], at: Plan, python: str = sys.executable) -> dict[str, float]:
    """The medians of a job's numbers over the steps that count. Raises ArmFailed."""
    place = at.folder / "job"
    place.mkdir()
    try:
        paths = os.pathsep.join(map(str, (harness.HERE.parent, SIMULATED)))
        argv = (python, "-m", "runner", *QUIET, f"device.threads={at.threads}", *words)
        harness.command(("env", f"PYTHONPATH={paths}", *argv), at.threads, place)
        return medians((place / "outputs" / "latest" / "metrics.jsonl").read_text())
    finally:
        shutil.rmtree(place)


def medians(lines: str) -> dict[str, float]:
    """Of each number that every step has."""
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines()][WARM_UP:-1]
    names = set.intersection(*({name for name, value in step.items() if value is not None} for step in steps))
    return {name: median(step[name] for step in steps) for name in sorted(names)}


def middle(results: Sequence[Mapping[str, float]], key: str) -> float:
    """The median over rounds."""
    return median(one[key] for one in results)
