"""What a sweep shows while it runs: a table that fits its terminal, and the time to go where it is known."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from runner.sweep import plan as plans
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepState
from runner.sweep.progress import SweepScreen, remaining_s
from runner.sweep.results import MetricsTail
from runner.sweep.scheduler import RunningJob

ROOT = Path(__file__).resolve().parents[2]


def sweep(where: Path, count: int) -> tuple[Plan, SweepState, plans.SweepFolder]:
    jobs = list(JobPlan(i, {"optimizer.lr": "0.1", "seed": f"{i}\x1b[2J"}) for i in range(count))
    made = Plan("toy", (), {"steps": 10}, jobs, {}, (Ranking("eval/loss", "min", "last", "x"),))
    folder = plans.create_sweep_folder("toy", where)
    return made, SweepState.create(folder, count), folder


def watched(path: Path, steps: list[int]) -> MetricsTail:
    watch = MetricsTail(path)
    for step in steps:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "eval/loss": 0.25}) + "\n")
        watch.read()
    return watch


def drawn(
    made: Plan, record: SweepState, folder: plans.SweepFolder, running: dict[int, RunningJob], height: int
) -> list[str]:
    stream = io.StringIO()
    screen = SweepScreen(folder, made, record, stream=stream)
    screen.show(running)
    Console(file=stream, width=100).print(screen.table(height))
    return stream.getvalue().splitlines()


class Eight:
    """A job that has run for eight seconds."""

    identity: Mapping[str, object] = {}
    devices = ("1",)
    seconds = 8.0
    reason = None

    def poll(self) -> None:
        return None

    def signal(self, number: int) -> None:
        raise AssertionError(number)


def running(tmp_path: Path, steps: list[int]) -> RunningJob:
    return RunningJob(Eight(), watched(tmp_path / "m.jsonl", steps), since=time.monotonic() - Eight.seconds)


@pytest.mark.parametrize("height", [10, 24, 60])
def test_the_table_fits_and_shows_what_runs_first(tmp_path: Path, height: int) -> None:
    made, record, folder = sweep(tmp_path, 40)
    record.update(7, state="failed", error="x")
    record.update(20, state="running", attempts=1)
    lines = drawn(made, record, folder, {20: running(tmp_path, [1, 4])}, height)
    assert len(lines) <= height
    rows = [line.split() for line in lines if "0.1" in line]
    assert rows[0][0] == "20" and "4/10" in rows[0] and "0.25" in rows[0] and rows[1][0] == "7"
    assert rows[0][-1] == "020"  # the run folder
    assert "38 waiting · 1 running · 1 failed" in "\n".join(lines) and "\x1b" not in "".join(lines)
    assert (f"and {40 - len(rows)} more" in "\n".join(lines)) == (len(rows) < 40)


def test_the_time_to_go_is_said_once_it_is_known(tmp_path: Path) -> None:
    made, record, _ = sweep(tmp_path, 3)
    record.update(0, state="done")
    record.update(1, state="running")
    assert remaining_s(made, record, {}) is None
    one = running(tmp_path, [5, 9])  # four steps in 8 s were seen: a resumed job's earlier ones are no pace
    assert remaining_s(made, record, {1: one}) == pytest.approx((1 + 10) * 2.0, rel=0.1)


def test_a_watch_follows_a_file_that_is_replaced_and_skips_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    watch = watched(path, [1, 2, 3])
    assert (watch.step, watch.values) == (3, {"eval/loss": 0.25})
    (tmp_path / "new").write_text('{"step": 1, "eval/loss": 9.0}\nnonsense\n{"step": 2, "ev')
    os.replace(tmp_path / "new", path)
    watch.read()
    assert (watch.step, watch.values) == (1, {"eval/loss": 9.0})
    with path.open("a") as file:
        file.write('al/loss": 8.0}\n')
    watch.read()
    assert (watch.step, watch.values) == (2, {"eval/loss": 8.0})


def test_a_terminal_gets_a_live_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tests.sweep.toy", str(tmp_path), "start", "good,where,raises"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environment
    ) as run:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # Linux says so when the other side is closed
            pass
        os.close(ours)
    text = shown.decode()
    assert run.returncode == 9
    assert "\x1b[" in text and "state" in text and "device" in text
    assert "best     job 0" in text and "1 of 3 jobs failed" in text
