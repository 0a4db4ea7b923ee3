"""The screen on a real pseudo-terminal and on a pipe: what is shown, how often, at what cost, what is not."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.core.errors import RunnerError, StorageError
from runner.tracker.console import Console
from runner.tracker.text import Progress, render_panel

ROOT = Path(__file__).resolve().parents[2]
TITLE = {"name": "toy", "device": "cpu", "seed": 0, "folder": "outputs/x"}
VALUES = {"train/loss": 0.25, "train/lr": 1e-3, "perf/tokens_per_s": 12345.0, "perf/peak_memory_bytes": 9.2e8}
SHOW = """
import sys, time
from pathlib import Path
from runner.tracker import console as module
module.LINE_EVERY_S = 1e9  # no line because time has passed: a busy machine takes 5 s for a step
console = module.Console(Path(sys.argv[1]))
console.message("hello")
console.start({"name": "toy", "device": "cpu", "seed": 0, "folder": "outputs/x"}, 40)
durations_s = []
for step in range(1, 41):
    values = {"train/loss": 1 / step, "train/lr": 1e-3, "perf/tokens_per_s": 12345.0, "perf/peak_memory_bytes": 9.2e8}
    if step % 20 == 0:
        values["eval/exact_match"] = step / 40
        console.sample({"prompt": "sort [red]", "answer": "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m", "expected": "1"})
        console.message("decided  x", "warning")
    begin = time.perf_counter()
    console.step(step, values)
    durations_s.append(time.perf_counter() - begin)
    time.sleep(0.02)
console.stop([f"done     median {sorted(durations_s)[20]:.6f}"])
"""


def on_terminal(log: Path, **environment: str) -> str:
    """What the program writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    os.set_inheritable(theirs, True)
    size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-c", SHOW, str(log)],
        cwd=ROOT,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | size | environment,
    ):
        os.close(theirs)
        output = b""
        while True:
            try:
                if not (piece := os.read(ours, 65536)):
                    break
            except OSError:  # Linux says EIO when the other side is closed
                break
            output += piece
    os.close(ours)
    return output.decode()


def test_a_terminal_shows_a_live_panel_of_80_columns_a_few_times_a_second(tmp_path: Path) -> None:
    begin = time.monotonic()
    shown = on_terminal(tmp_path / "run.log")
    seconds = time.monotonic() - begin
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert 3 <= shown.count("╭") <= 4 * seconds + 4
    assert max(map(len, re.split("[\r\n]+", plain))) <= 80
    for word in ("toy · step 40/40", "ETA", "loss", "exact match", "best 1 @ 40", "12.3k tok/s", "920 MB", "lr", "█"):
        assert word in plain, word
    assert "toy · device cpu · seed 0 · outputs/x" in plain
    assert "warning: decided  x" in plain
    assert "sort [red] → \\x1b]0;owned\\x07\\x1b[2J\\x9b31m" in plain
    assert "owned\x07" not in shown and "\x1b[2J" not in shown and "\x9b" not in shown
    assert float(plain.rpartition("median ")[2].split()[0]) < 0.05
    assert "\x1b[3" in shown


def test_no_color_means_none(tmp_path: Path) -> None:
    shown = on_terminal(tmp_path / "run.log", NO_COLOR="1")
    assert "loss" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    shown = on_terminal(tmp_path / "run.log", TERM="dumb")
    assert "\x1b" not in shown and "\n  40/40 " in shown.replace("\r", "")


def test_a_pipe_gets_plain_lines_at_sensible_intervals(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    environment = os.environ | {"FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(log)], cwd=ROOT, capture_output=True, env=environment, check=True
    )
    lines = done.stdout.decode().splitlines()
    assert b"\r" not in done.stdout and b"\x1b" not in done.stdout and done.stderr == b""
    steps = [re.match(r" *(\d+)/40 +\S+ ", line) for line in lines]
    assert [m[1] for m in steps if m] == ["1", "20", "40"]
    assert lines[-1].startswith("done     ")
    said = [re.sub(r"^\S+ (info   |warning) ", "", line) for line in log.read_text().splitlines()]
    assert said == [line.removeprefix("warning: ") for line in lines]
    assert all(
        re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (info   |warning) ", x)
        for x in log.read_text().splitlines()
    )


@pytest.mark.parametrize(("share", "shown"), [(0.0, False), (0.25, True), (1.0, True)])
def test_groups_of_equal_rewards_are_shown_where_there_are_any(share: float, shown: bool, tmp_path: Path) -> None:
    progress = Progress({}, steps=3, begin=0.0)
    progress.update(1, {"train/loss": 0.0, "reward/mean": 0.1, "reward/zero_variance": share}, 1.0)
    assert (f"equal groups {share:.0%}" in str(render_panel(progress, 1.0, 80).renderable)) is shown


def test_a_step_costs_less_than_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    console = Console(tmp_path / "run.log", io.StringIO())
    console.start(TITLE, 10**6)
    begin = time.process_time()
    for step in range(1, 2001):
        console.step(step, VALUES)
    assert (time.process_time() - begin) / 2000 < 1e-4


def test_an_unknown_run_still_shows_its_loss(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(tmp_path / "run.log", stream)
    console.start(TITLE, 1)
    console.step(1, {"train/loss": float("nan"), "mine/other": 3.0})
    assert "nan" in stream.getvalue()


def test_secrets_and_controls_reach_neither_screen_nor_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "open sesame 42")
    stream = io.StringIO()
    console = Console(tmp_path / "run.log", stream)
    console.message("a\tb\x1b[2J open sesame 42\nsecond \u202e line", "error")
    console.sample({"prompt": "p", "answer": "open sesame 42"})
    assert stream.getvalue() == "error: a\\tb\\x1b[2J ***\nsecond \\u202e line\nsample    p → ***\n"
    log = (tmp_path / "run.log").read_text()
    assert "sesame" not in log and log.count("\n") == 3


def test_a_screen_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    console = Console(tmp_path / "run.log", stream)
    console.start(TITLE, 10)
    os.close(read)
    for step in range(1, 11):
        console.step(step, {**VALUES, "eval/loss": 1.0})
    console.stop(["done"])
    log = (tmp_path / "run.log").read_text()
    assert log.count("the terminal closed (Broken pipe)") == 1 and " 10/10 " in log and "done" in log
    stream.close()  # nor does what is left change its exit code


def test_a_narrow_character_set_does_not_stop_the_run(tmp_path: Path) -> None:
    raw = io.BytesIO()
    console = Console(tmp_path / "run.log", io.TextIOWrapper(raw, encoding="ascii"))
    console.message("größer → \udc80")
    assert raw.getvalue() == b"gr\\xf6\\xdfer \\u2192 \\udc80\n"


def test_stop_may_come_twice_and_before_the_start(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(tmp_path / "run.log", stream)
    console.stop([])
    console.start(TITLE, 1)
    console.stop(["end"])
    console.stop([])
    assert stream.getvalue().splitlines()[1:] == ["end"]
    with pytest.raises(RunnerError):
        console.step(1, {})


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"run\.log"):
        Console(tmp_path / "nowhere/run.log", io.StringIO()).message("x")
