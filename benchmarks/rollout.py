"""Rollouts: weights to samplers, Ray, vLLM beside torch, sampler against trainer, sampling beside training, tools.

    python benchmarks/rollout.py [--quick] [--only PART …] [--rounds N] [--vllm PYTHON] [--out FILE]

Everything runs in turn, and ratios are those of one round. Exits with 1 if an arm fails, if arms do not learn the same
or reported logprobs are not the trainer's; speed never fails it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
from parts import engines, mismatch, overlap, places, sync, tools
from parts.plan import Plan

ROUNDS = 3
PARTS: dict[str, Any] = {
    "sync": sync,
    "places": places,
    "engines": engines,
    "mismatch": mismatch,
    "overlap": overlap,
    "tools": tools,
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--quick", action="store_true", help="one short round of a few cases")
    out.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    out.add_argument("--rounds", type=int, help="turns of all arms")
    out.add_argument("--threads", type=int, default=1, help="threads of every process")
    out.add_argument("--vllm", help="Python of an environment with vLLM, for the part engines")
    out.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    return out


def main() -> int:
    """Exit code 0, or 1 if an arm failed or something is wrong."""
    asked = parser().parse_args()
    rounds = asked.rounds or (1 if asked.quick else ROUNDS)
    measured = {}
    try:
        for name in asked.only:
            with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
                at = Plan(Path(place), rounds, asked.threads, asked.quick, trl=False, vllm=asked.vllm)
                measured[name] = PARTS[name].measure(at)
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
