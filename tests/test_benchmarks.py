"""What the benchmarks' own checks decide; and each script, once, at its smallest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ([64.0] * 4, [64.0] * 4, 0.0),
        ([64.0] * 4, [63.0] * 4, float("inf")),
        ([1.0, 3.0], [5.0, 5.0], 3.0),  # a standard error of 1
    ],
)
def test_how_many_standard_errors_two_arms_lie_apart(a: list[float], b: list[float], wanted: float) -> None:
    code = f"from parts.grpo import _errors_apart; print(_errors_apart({a}, {b}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "sft.py --quick --no-growth --steps 3 --batch 4",
        "rl.py --quick --only sampler",
        "rl.py --quick --only dpo grpo loop ahead",
        "rollout.py --quick --only sync",
        "rollout.py --quick --only overlap",
        "rollout.py --quick --only tools",
        "parallel.py --only ddp --steps 3",
        "images.py --group 2 --pixels 32 --rounds 1",
        "prompts.py --prompt 32 --completion 4 --group 2 --rounds 1",
        "saving.py --quick --rounds 1",
        "tokenizing.py --rows 60 --rounds 1",
        "data_path.py --ranks 8 --batch-size 16 --longest 256 --steps 1",
        "data_path.py --kind grpo --ranks 2 --batch-size 16 --longest 256 --steps 1",
        "start.py --only typo --rounds 1",
        "plan.py full",
        "tinker.py --rows 2 --tokens 8 --rounds 1 --steps 2",
    ],
    ids=lambda words: words.replace(" ", "_"),
)
def test_a_script_runs(words: str, tmp_path: Path) -> None:
    script, *options = words.split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_is_run() -> None:
    [mark] = [one for one in test_a_script_runs.pytestmark if one.name == "parametrize"]  # type: ignore[attr-defined]
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == {words.split()[0] for words in mark.args[1]}
