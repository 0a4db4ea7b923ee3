"""Runs the arms, each in a process of its own, one after another and round after round.

settings ──▶ workload ──▶ A B C D · A B C D · … ──▶ results per arm and round
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arms import workload

HERE = Path(__file__).resolve().parent
TRL_VENV = HERE / ".venv-trl"
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "accelerate", "datasets", "peft")
LR = 1e-3
WARM_UP = 2  # steps that are not counted
DEADLINE_S = 1800
PIP_DEADLINE_S = 3600


class ArmFailed(Exception):
    """An arm ended with an error; the message holds the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training: a module of `arms/` and the interpreter it needs."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    python: str = sys.executable


PADDED = Arm("bare loop, padded", "arms.bare", ("padded",))
FLAT = Arm("bare loop, no padding, block mask", "arms.bare", ("flat",))
ROWS = Arm("bare loop, no padding, by row", "arms.bare", ("rows",))
RUNNER = Arm("this runner", "arms.runner_cli", ("sft",))
TRL = Arm("TRL SFTTrainer", "arms.trl_sft", (), str(TRL_VENV / "bin" / "python"))


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured."""

    rounds: int
    steps: int
    batch: int
    threads: int
    start_ups: int
    growth: tuple[tuple[int, int, int], ...]  # rows, length, vocabulary
    grown: tuple[str, ...]  # arms of the growth table


def environment(threads: int, folder: Path) -> dict[str, str]:
    """One thread, no hub, and a token cache that the first round finds empty."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RUNNER_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "BENCHMARK_STARTED": repr(time.time()),
    }


def command(argv: Sequence[str], threads: int, folder: Path, expected: int = 0) -> float:
    """Run to the end in `folder`; returns wall seconds. Raises ArmFailed unless it exits with `expected` in time."""
    begin = time.perf_counter()
    output(argv, threads, folder, expected)
    return time.perf_counter() - begin


def output(argv: Sequence[str], threads: int, folder: Path, expected: int = 0) -> str:
    """As `command`; returns what was printed."""
    env = environment(threads, folder)
    try:
        done = subprocess.run(list(argv), cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise ArmFailed(f"{' '.join(argv)}\ndid not end within {DEADLINE_S} s") from error
    if done.returncode != expected:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise ArmFailed(f"{' '.join(argv)}\nexited with {done.returncode}, expected {expected}:\n{tail}")
    return done.stdout


def run_arm(arm: Arm, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train once; returns the arm's result (see `arms.stamps.write`) with its rates."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    numbers = (str(folder), str(result), str(settings.steps), str(settings.batch), str(LR))
    process_s = command((arm.python, "-m", arm.module, *arm.options, *numbers), settings.threads, folder)
    return rates(json.loads(result.read_text()), workload.read(folder), settings.batch) | {"process_s": process_s}


def rates(result: Mapping[str, Any], rows: workload.Rows, batch: int) -> dict[str, Any]:
    """The result with conversations and tokens (without padding) per second of processor and wall time."""
    counted = range(WARM_UP, len(result["cpu_s"]))
    tokens = sum(rows.tokens(step, batch) for step in counted)
    out = dict(result)
    for clock in ("cpu_s", "wall_s"):
        seconds = result[clock][-1] - result[clock][WARM_UP - 1]
        out |= {f"conversations_per_{clock}": len(counted) * batch / seconds, f"tokens_per_{clock}": tokens / seconds}
    return out


def side_by_side(arms: Sequence[Arm], settings: Settings, folder: Path) -> Iterator[tuple[Arm, dict[str, Any]]]:
    """A B C D A B C D …: each arm once per round."""
    for _ in range(settings.rounds):
        for arm in arms:
            yield arm, run_arm(arm, settings, folder)


def grow(kind: str, point: tuple[int, int, int], chunk: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """Seconds and memory of one step of `kind` (see `arms.growth`)."""
    result = folder / "growth.json"
    numbers = [str(n) for n in (*point, chunk, 2)]
    command((sys.executable, "-m", "arms.growth", kind, str(result), *numbers), settings.threads, folder)
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def start_up(settings: Settings, folder: Path) -> dict[str, float]:
    """Wall seconds, the least of several, of composing a job and of answering a typo."""
    python = (sys.executable, "-m", "runner")
    cases = {"--cfg job": ((*python, "--cfg", "job"), 0), "a typo": ((*python, "optimizer.lrr=1"), 2)}
    return {
        name: min(command(argv, settings.threads, folder, code) for _ in range(settings.start_ups))
        for name, (argv, code) in cases.items()
    }


def install_trl() -> None:
    """Make the environment of the TRL arm, once. Raises ArmFailed where pip does."""
    if (TRL_VENV / "complete").exists():
        return
    pip = (TRL.python, "-m", "pip", "install", "--quiet")
    steps = ((sys.executable, "-m", "venv", str(TRL_VENV)), (*pip, "torch==2.13.0"), (*pip, *TRL_PACKAGES))
    for argv in steps:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PIP_DEADLINE_S)
        if done.returncode:
            raise ArmFailed(f"{' '.join(argv)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (TRL_VENV / ".gitignore").write_text("*\n")
    (TRL_VENV / "complete").touch()
