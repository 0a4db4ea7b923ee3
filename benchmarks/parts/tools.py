"""Throughput of episodes with tools of 1 to 300 ms, over that of the sampler alone with the same requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import measure as harness
import report

from parts import plan
from parts.plan import Plan

EPISODES, QUICK_EPISODES = 256, 96
HEAD = ("episodes", "tokens/s", "sampler alone", "of the sampler's own")


def measure(at: Plan) -> dict[str, Any]:
    """All rounds, in a process of their own."""
    file, episodes = at.folder / "tools.json", QUICK_EPISODES if at.quick else EPISODES
    harness.command(
        (sys.executable, "-m", "arms.tools", str(file), str(episodes), str(at.rounds)), at.threads, at.folder
    )
    return {"episodes": episodes, "rounds": json.loads(file.read_text())}


def rate(arm: Mapping[str, float]) -> float:
    """Tokens per second."""
    return arm["tokens"] / arm["wall_s"]


def show(measured: dict[str, Any]) -> str:
    """Tokens per second, and ratios within rounds."""
    rounds = measured["rounds"]
    rates = (f"{median(rate(one[arm]) for one in rounds):.0f}" for arm in ("episodes", "engine"))
    ratios = plan.shown([rate(one["episodes"]) / rate(one["engine"]) for one in rounds])
    return report.table(HEAD, [(str(measured["episodes"]), *rates, ratios)])


def problems(measured: dict[str, Any]) -> list[str]:
    """Rounds in which the sampler alone wrote other numbers of tokens."""
    return [
        f"the episodes have {one['episodes']['tokens']} tokens, the sampler alone {one['engine']['tokens']}"
        for one in measured["rounds"]
        if abs(one["episodes"]["tokens"] / one["engine"]["tokens"] - 1) > 0.01
    ]
