"""What the command `run` costs beside the training: the first step, the answer to a typo, and a sweep.

    python benchmarks/start.py [--rounds 7] [--out FILE]

first step   a whole process that reads a JSONL file, tokenizes it and takes one step: `run` ÷ a loop written by hand
typo         a whole process that names a misspelt option: `run` ÷ Hydra's compose of the same config
sweep        four short jobs as a sweep, one after another ÷ the same four jobs typed one by one

Processor seconds of the process and of all that it started and awaited, one thread, A B A B …; a ratio is taken within
a round. Exits with 1 if an arm fails, or if the two first steps have different losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import measure
import report
from arms import runner_cli

ROWS = 16
CONF = measure.HERE.parent / "conf"
RECIPES = measure.HERE.parent / "recipes"
RECIPE = "sft_demo"
SEEDS = 4
Pair = tuple[list[float], list[float]]  # processor seconds of `run` and of its base, one per round


class Arm(NamedTuple):
    """Commands that run one after another, and the exit code of each."""

    commands: Sequence[Sequence[str]]
    code: int = 0


def processor_s(arm: Arm, folder: Path) -> float:
    """Processor seconds of the commands and of the processes that they awaited. Raises ArmFailed."""
    before = os.times()
    for argv in arm.commands:
        measure.command(argv, 1, folder, arm.code)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def commands(folder: Path) -> dict[str, tuple[Arm, Arm]]:
    """What is compared: (`run`, its base)."""
    python = (sys.executable, "-m")
    options = [*runner_cli.common(1, ROWS, 1e-3), f"data.path={folder}/batch.jsonl", f"model.path={folder}/model"]
    first = (*python, "runner", "algorithm=sft", "adapter=none", *options)
    typo = (*python, "runner", f"+recipe={RECIPE}", "optimzer.lr=1")
    job = (f"+recipe={RECIPE}", "model.hidden_size=16", "model.layers=1", "steps=30", "tracker=none")
    sweep = (*python, "runner", "-m", *job, f"seed=range({SEEDS})", "sweep.parallel=1")
    return {
        "first step": (Arm([first]), Arm([(*python, "arms.first_step", str(folder))])),
        "typo": (Arm([typo], 2), Arm([(*python, "arms.hydra_compose", str(folder / "conf"), f"+recipe={RECIPE}")])),
        "sweep": (Arm([sweep]), Arm([(*python, "runner", *job, f"seed={seed}") for seed in range(SEEDS)])),
    }


def prepare(folder: Path) -> None:
    """The model, one batch of conversations, and conf/ with the recipe in a config group of Hydra's."""
    measure.command((sys.executable, "-m", "arms.workload", str(folder)), 1, folder)
    lines = (folder / "conversations.jsonl").read_text().splitlines(keepends=True)
    (folder / "batch.jsonl").write_text("".join(lines[:ROWS]))
    (folder / "conf").mkdir()
    for place in CONF.iterdir():
        (folder / "conf" / place.name).symlink_to(place)
    (folder / "conf" / "recipe").mkdir()
    recipe = (RECIPES / f"{RECIPE}.yaml").read_text()
    (folder / "conf" / "recipe" / f"{RECIPE}.yaml").write_text(f"# @package _global_\n{recipe}")  # Hydra wants it first


def compare(folder: Path, rounds: int, only: str | None) -> dict[str, Pair]:
    """All rounds; one round before them fills the caches of the file system and is not counted."""
    found: dict[str, Pair] = {}
    for name, arms in commands(folder).items():
        if only not in (None, name):
            continue
        taken = [[processor_s(arm, folder) for arm in arms] for _ in range(rounds + 1)][1:]
        found[name] = ([a for a, _ in taken], [b for _, b in taken])
        print(f"  {name}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, Pair]) -> str:
    """Medians, and the median, least and greatest ratio of a round."""
    rows = []
    for name, (ours, base) in found.items():
        ratios = sorted(a / b for a, b in zip(ours, base, strict=True))
        numbers = (median(ours), median(base), median(ratios), ratios[0], ratios[-1])
        rows.append((name, *(f"{number:.2f}" for number in numbers)))
    return report.table(("processor s of a process", "run", "base", "ratio", "least", "greatest"), rows)


def losses(folder: Path) -> tuple[float, float]:
    """The loss of the first step by `run`, and by hand."""
    ours, base = (arm.commands[0] for arm in commands(folder)["first step"])
    measure.command(ours, 1, folder)
    record = json.loads((folder / "outputs" / "latest" / "metrics.jsonl").read_text().splitlines()[0])
    return record["train/loss"], float(measure.output(base, 1, folder))


def main() -> int:
    """Exit code 0, or 1 if an arm failed or the first steps are not the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of both arms")
    parser.add_argument("--only", choices=("first step", "typo", "sweep"), help="one of the three")
    parser.add_argument("--out", type=Path, help="write the seconds of every round to this JSON file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as the arms have it, and as `run` is told by device.threads
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
            prepare(Path(place))
            ours, by_hand = losses(Path(place))
            found = compare(Path(place), arguments.rounds, arguments.only)
    except measure.ArmFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(f"loss of the first step: run {ours:.6f}, by hand {by_hand:.6f}")
    return 0 if math.isclose(ours, by_hand, rel_tol=report.FOUR_DIGITS) else 1


if __name__ == "__main__":
    sys.exit(main())
