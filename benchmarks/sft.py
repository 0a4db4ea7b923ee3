"""Supervised fine-tuning side by side: this runner, bare PyTorch loops, and TRL.

    python benchmarks/sft.py [--quick] [--trl] [--out FILE]

The same tiny model, the same tokens, one thread; ratios are to the padded loop. Exits with 1 if the arms do not
learn the same (their first losses are compared), whatever their speed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import report
from measure import FLAT, PADDED, ROWS, RUNNER, TRL, Arm, Settings

FULL = Settings(
    rounds=3,
    steps=22,
    batch=16,
    threads=1,
    start_ups=5,
    growth=(
        (16, 64, 512),
        (16, 128, 512),
        (16, 256, 512),
        (4, 128, 512),
        (64, 64, 512),
        (16, 64, 32_768),
        (16, 64, 131_072),
        (16, 256, 32_768),
        (8, 256, 131_072),
    ),
    grown=("runner", "rows", "flat"),
)
QUICK = Settings(
    rounds=1, steps=6, batch=16, threads=1, start_ups=2, growth=((8, 128, 32_768),), grown=("runner", "flat")
)
CHUNK = 256  # tokens whose logits the runner holds at once in the growth table


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What was asked for."""
    base = QUICK if arguments.quick else FULL
    return Settings(
        rounds=arguments.rounds or base.rounds,
        steps=max(arguments.steps or base.steps, measure.WARM_UP + 1),
        batch=arguments.batch,
        threads=arguments.threads,
        start_ups=base.start_ups,
        growth=() if arguments.no_growth else base.growth,
        grown=base.grown,
    )


def compare(arms: Sequence[Arm], settings: Settings, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All rounds, by arm."""
    results: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for arm, result in measure.side_by_side(arms, settings, folder):
        results[arm.name].append(result)
        say(f"  {arm.name:36}{result['conversations_per_cpu_s']:7.1f} conv./cpu-s")
    return results


def growth(settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """Every point by the runner and the bare loops without padding, in turn."""
    out = []
    for point in settings.growth:
        kinds = {kind: measure.grow(kind, point, CHUNK, settings, folder) for kind in settings.grown}
        out.append({"point": point, "kinds": kinds})
        say("  {} x {}, vocabulary {}".format(*point))
    return out


def say(line: str) -> None:
    """Progress, beside the tables."""
    print(line, file=sys.stderr, flush=True)


def everything(arms: Sequence[Arm], settings: Settings, folder: Path) -> dict[str, Any]:
    """Measure it all."""
    say("making model and data")
    measure.command((sys.executable, "-m", "arms.workload", str(folder)), settings.threads, folder)
    start_up = measure.start_up(settings, folder)
    results = compare(arms, settings, folder)
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "results": results,
        "summary": report.summary(results, PADDED.name),
        "disagreements": report.disagreements(results),
        "start_up_s": start_up,
        "first_step_s": report.first_step(results, RUNNER.name, FLAT.name),
        "growth": growth(settings, folder),
    }


def show(measured: dict[str, Any]) -> None:
    """The tables, to stdout."""
    results = measured["results"]
    print("\n" + report.speed(results, PADDED.name) + "\n")
    for loop in (FLAT, ROWS):
        against = report.ratio(results, RUNNER.name, loop.name, "conversations_per_cpu_s")
        print(f"{RUNNER.name} / {loop.name}: {against:.2f}")
    print("\n" + report.losses(results))
    print("\n" + report.start_up(measured["start_up_s"]))
    print("\n" + report.first_steps(measured["first_step_s"]))
    if measured["growth"]:
        print(f"\none step; memory above model and optimizer state; the runner's head takes {CHUNK} tokens at once")
        print(report.growth(measured["growth"]))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--quick", action="store_true", help="one short round, one growth point: under 90 s")
    out.add_argument("--trl", action="store_true", help="with TRL's SFTTrainer; installs it into benchmarks/.venv-trl")
    out.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    out.add_argument("--rounds", type=int, help="rounds of all arms")
    out.add_argument("--steps", type=int, help="optimizer steps of an arm in a round")
    out.add_argument("--batch", type=int, default=16, help="conversations per step")
    out.add_argument("--threads", type=int, default=1, help="threads of every arm")
    out.add_argument("--no-growth", action="store_true", help="without the growth table")
    return out


def main() -> int:
    """Exit code 0, or 1 if an arm failed or the arms do not learn the same."""
    arguments = parser().parse_args()
    arms = [PADDED, FLAT, ROWS, RUNNER, *([TRL] if arguments.trl else [])]
    try:
        if arguments.trl:
            measure.install_trl()
        with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
            measured = everything(arms, settings_of(arguments), Path(place))
    except measure.ArmFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.out:
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n")
    show(measured)
    for line in measured["disagreements"]:
        print(f"error: {line}", file=sys.stderr)
    return 1 if measured["disagreements"] else 0


if __name__ == "__main__":
    sys.exit(main())
