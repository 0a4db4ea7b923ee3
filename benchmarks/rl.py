"""Reinforcement learning and preferences side by side: this runner, TRL, and transformers' ways of sampling.

    python benchmarks/rl.py [--quick] [--trl] [--only PART …] [--rounds N] [--threads N] [--out FILE]

The same tiny model, data and lengths, one thread. Exits with 1 if an arm fails, if arms do not learn the same or sample
from the same distribution, or if reported logprobs are not the model's; speed never fails it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
from parts import ahead, dpo, grpo, loop, sampler
from parts.plan import Plan

ROUNDS = 3
PARTS: dict[str, Any] = {"sampler": sampler, "dpo": dpo, "grpo": grpo, "loop": loop, "ahead": ahead}


def everything(chosen: list[str], plan: Plan) -> dict[str, Any]:
    """The chosen parts, one after another."""
    for module in ("arms.workload", "arms.preferences"):
        measure.command((sys.executable, "-m", module, str(plan.folder)), plan.threads, plan.folder)
    return {name: PARTS[name].measure(plan) for name in chosen}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--quick", action="store_true", help="one short round of a few cases: under two minutes")
    out.add_argument("--trl", action="store_true", help="with TRL's trainers; installs it into benchmarks/.venv-trl")
    out.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    out.add_argument("--rounds", type=int, help="turns of all arms")
    out.add_argument("--threads", type=int, default=1, help="threads of every arm")
    out.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    return out


def main() -> int:
    """Exit code 0, or 1 if an arm failed or something is wrong."""
    asked = parser().parse_args()
    rounds = asked.rounds or (1 if asked.quick else ROUNDS)
    try:
        if asked.trl:
            measure.install_trl()
        with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
            measured = everything(asked.only, Plan(Path(place), rounds, asked.threads, asked.quick, asked.trl))
    except measure.ArmFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if asked.out:
        asked.out.write_text(json.dumps(measured, indent=1) + "\n")
    for name, found in measured.items():
        print("\n" + PARTS[name].show(found))
    problems = [line for name, found in measured.items() for line in PARTS[name].problems(found)]
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
