"""The table in run.log: its columns by what a run measures, its width, its headers, and the lines below its rows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from runner.tracker.console import COLUMNS, HEADER_EVERY, LINE_WIDTH, Console, LogTable, eval_lines, sample_lines
from runner.tracker.text import METRICS, Progress

SFT = {
    "train/loss": 6.2771,
    "train/grad_norm": 9.24,
    "train/lr": 9.524e-05,
    "perf/tokens_per_s": 9710.3,
    "perf/mfu": 0.5302,
    "perf/peak_memory_bytes": 639e6,
}
PREFERENCE = SFT | {"train/accuracy": 0.9531, "reward/margin": -0.012345}
RL = SFT | {"reward/mean": -1.2345e-05, "rollout/length": 123.45, "policy/kl": 4.123e-4, "reward/zero_variance": 0.25}


def rows(metrics: dict[str, float], steps: int = 200, elapsed_s: float = 7.0) -> list[str]:
    progress = Progress({}, steps, begin=0.0)
    progress.update(1, metrics, 0.0)
    progress.update(2, metrics, elapsed_s)
    return LogTable().lines(progress, elapsed_s)


def test_a_run_has_the_columns_of_what_it_measures() -> None:
    head, row = rows(SFT)
    assert " ".join(head.split()) == "step loss grad norm lr tok/s MFU memory elapsed ETA"
    assert " ".join(row.split()) == "2/200 6.277 9.24 9.52e-05 9.71k 53.0% 639 MB 00:07 23:06"
    [head, _] = rows(PREFERENCE)
    assert " ".join(head.split()) == "step accuracy margin loss grad norm tok/s memory elapsed ETA"
    head, row = rows(RL)
    assert " ".join(head.split()) == "step reward loss KL length equal grad norm tok/s elapsed ETA"
    assert row.split()[:6] == ["2/200", "-1e-05", "6.277", "0.000412", "123.5", "25%"]


@pytest.mark.parametrize("metrics", [SFT, PREFERENCE, RL, dict.fromkeys(COLUMNS, 0.012345)])
@pytest.mark.parametrize("steps", [1, 200, 100_000])
def test_no_line_is_wider_than_120_with_its_time_stamp(metrics: dict[str, float], steps: int, tmp_path: Path) -> None:
    lines = rows(metrics | {f"eval/set{n}/exact_match": n / 7 for n in range(9)}, steps, elapsed_s=12 * 86400.0 / steps)
    assert max(map(len, lines)) <= LINE_WIDTH and len({len(line) for line in lines[:2]}) == 1
    console = Console(tmp_path / "run.log", io.StringIO())
    console.start({"name": "toy"}, steps)
    console.step(steps, metrics)
    console.sample({"prompt": "p " * 80, "answer": "a" * 200})
    assert max(map(len, (tmp_path / "run.log").read_text().splitlines())) <= 120


def test_a_row_shows_what_its_own_step_measured_below_the_same_columns() -> None:
    progress, table = Progress({}, 3, begin=0.0), LogTable()
    progress.update(1, SFT | {"eval/loss": 3.0, "eval/accuracy": 0.5}, 1.0)
    assert table.lines(progress, 1.0)[2:] == ["eval      step=1 eval/loss=3 eval/accuracy=0.5"]
    progress.update(2, {name: value for name, value in SFT.items() if name != "train/lr"}, 2.0)
    [row] = table.lines(progress, 2.0)
    assert row.split()[:4] == ["2/3", "6.277", "9.24", "-"]
    progress.update(3, RL, 3.0)
    assert "reward" in table.lines(progress, 3.0)[0], "a new column has a new header"


def test_a_header_stands_before_every_50_rows() -> None:
    progress, table = Progress({}, 120, begin=0.0), LogTable()
    lines = []
    for step in range(1, 121):
        progress.update(step, SFT, step)
        lines += table.lines(progress, step)
    assert [index for index, line in enumerate(lines) if "loss" in line] == [0, HEADER_EVERY + 1, 2 * HEADER_EVERY + 2]


def test_a_long_sample_is_wrapped_and_whole() -> None:
    text = "sort 4976 → " + " ".join(map(str, range(90)))
    lines = sample_lines(text)
    assert lines[0].startswith("sample    sort 4976 → 0 1 ") and len(lines) > 2
    assert " ".join(line[10:] for line in lines) == text
    assert sample_lines("") == ["sample    "]


def test_every_column_that_may_be_dropped_is_one() -> None:
    assert set(METRICS["dropped_first"]) <= set(COLUMNS) and "train/loss" not in METRICS["dropped_first"]


def test_an_interval_stands_behind_its_value() -> None:
    values = {"eval/pass@4": 0.5, "eval/pass@4_ci_low": 0.25, "eval/pass@4_ci_high": 0.75, "eval/loss": 2.0}
    assert " ".join(eval_lines(3, values)).split()[1:] == ["step=3", "eval/pass@4=0.5(0.25..0.75)", "eval/loss=2"]
