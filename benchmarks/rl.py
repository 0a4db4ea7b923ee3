"""Sampling side by side: this runner's sampler and transformers' `generate`.

    python benchmarks/rl.py [--quick] [--rounds N] [--threads N] [--out FILE]

Random models of 1 and 4 million parameters, one thread. Exits with 1 if an arm fails or if the reported logprobs are
not those of the model, whatever the speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import measure
import report
from arms.sampler import CASES, SIZES

ROUNDS = 3
QUICK = ("8 at once", "64, and 8 per prompt")  # of the smaller model, one round
LARGEST_DIFFERENCE = 1e-4  # of logprobs, in nats
HEAD = (
    "model, answers",
    "tokens/cpu-s",
    "generate",
    "ratio",
    "of its forwards",
    "generate's",
    "forwards",
    "generate's",
)


def one(size: str, case: str, rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    """All rounds of one case, in a process of its own."""
    result = folder / "sampler.json"
    argv = (sys.executable, "-m", "arms.sampler", str(result), size, case, str(rounds))
    measure.command(argv, threads, folder)
    measured: dict[str, Any] = json.loads(result.read_text())
    return {"size": size, "case": case, **measured}


def everything(cases: Sequence[tuple[str, str]], rounds: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    """All cases, one after another."""
    out = []
    for size, case in cases:
        out.append(one(size, case, rounds, threads, folder))
        print(f"  {size}, {case}", file=sys.stderr, flush=True)
    return out


def rate(arm: Mapping[str, float]) -> float:
    """Tokens per processor second."""
    return arm["tokens"] / arm["cpu_s"]


def line(measured: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table: medians over rounds, ratios within rounds."""
    rounds = measured["rounds"]
    arms = ("runner", "generate")
    return (
        f"{measured['size']}, {measured['case']}",
        *(f"{median(rate(r[arm]) for r in rounds):.0f}" for arm in arms),
        f"{median(rate(r['runner']) / rate(r['generate']) for r in rounds):.2f}",
        *(f"{median(r[arm]['cpu_s'] / r[arm]['forward_cpu_s'] for r in rounds):.2f}" for arm in arms),
        *(f"{rounds[0][arm]['forwards']}" for arm in arms),
    )


def disagreements(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cases whose reported logprobs are not the model's."""
    return [
        f"{m['size']}, {m['case']}: a reported logprob is off by {m['worst_logprob']:.1e}"
        for m in measured
        if not m["worst_logprob"] <= LARGEST_DIFFERENCE
    ]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--quick", action="store_true", help="two cases, one round: under a minute")
    out.add_argument("--rounds", type=int, help="turns of both arms")
    out.add_argument("--threads", type=int, default=1, help="threads of every arm")
    out.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    return out


def main() -> int:
    """Exit code 0, or 1 if an arm failed or logprobs are wrong."""
    arguments = parser().parse_args()
    cases = [(size, case) for size in SIZES for case in CASES]
    if arguments.quick:
        cases = [(next(iter(SIZES)), case) for case in QUICK]
    rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
            measured = everything(cases, rounds, arguments.threads, Path(place))
    except measure.ArmFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.out:
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n")
    print("\n" + report.table(HEAD, [line(m) for m in measured]))
    for problem in disagreements(measured):
        print(f"error: {problem}", file=sys.stderr)
    return 1 if disagreements(measured) else 0


if __name__ == "__main__":
    sys.exit(main())
