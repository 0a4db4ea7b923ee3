"""What the benchmarks' own checks decide, without running one."""

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
