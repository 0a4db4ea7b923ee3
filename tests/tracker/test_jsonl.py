"""metrics.jsonl and samples.jsonl: one line per step, never a torn one, and exactly cut back at a resume."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.core.errors import RunnerError
from runner.run_dir.folder import RunFolder
from runner.tracker.jsonl import JsonlTail, JsonlTracker, missing_steps, truncate_after
from runner.tracker.upload_process import Feed, FeedLines

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder: RunFolder, first: int, last: int) -> None:
    tracker = JsonlTracker(folder)
    for step in range(first, last + 1):
        tracker.log(step, {"train/loss": 1 / step})
        tracker.log_samples(step, [{"prompt": f"p{step}"}, {"prompt": "q"}])
    tracker.finish("done")


def test_a_line_is_there_when_log_returns(folder: RunFolder) -> None:
    tracker = JsonlTracker(folder)
    for step in (1, 2):
        tracker.log(step, {"train/loss": 0.1 + 0.2, "train/tokens": 7})
        assert folder.metrics.read_text().count("\n") == step
    assert (
        folder.metrics.read_text().splitlines()[0]
        == '{"step": 1, "train/loss": 0.30000000000000004, "train/tokens": 7}'
    )
    assert tracker.finish("done") == [] == tracker.finish("done")


@given(st.dictionaries(st.text(max_size=8).filter(lambda k: k != "step"), st.floats() | st.integers(-(2**60), 2**60)))
def test_numbers_survive_and_what_is_not_finite_is_null(metrics: dict[str, float]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        tracker = JsonlTracker(folder)
        tracker.log(1, metrics)
        tracker.finish("done")
        raw = folder.metrics.read_bytes()
        assert raw.count(b"\n") == 1 and not re.search("[\x7f-\x9f]", raw.decode())
        [line] = [json.loads(raw, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))]
    assert next(iter(line)) == "step"
    assert line == {"step": 1} | {k: v if math.isfinite(v) else None for k, v in metrics.items()}


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_repeats_or_goes_back_is_an_error_also_after_a_restart(folder: RunFolder, step: int) -> None:
    write(folder, 1, 2)
    tracker = JsonlTracker(folder)
    with pytest.raises(RunnerError, match=f"step {step} after step 2"):
        tracker.log(step, {})
    tracker.log(3, {})
    with pytest.raises(RunnerError, match="step 1 after step 2"):
        tracker.log_samples(1, [{}])
    tracker.finish("done")


@pytest.mark.parametrize(
    ("metrics", "said"), [({"a": "1"}, "not a number"), ({"a": None}, "not a number"), ({"step": 1}, "step")]
)
def test_what_is_no_metric_is_an_error_and_leaves_no_line(folder: RunFolder, metrics: Any, said: str) -> None:
    tracker = JsonlTracker(folder)
    with pytest.raises(RunnerError, match=said):
        tracker.log(1, metrics)
    assert folder.metrics.read_bytes() == b""
    tracker.finish("done")
    with pytest.raises(RunnerError, match="after the end"):
        tracker.log(1, {})


def test_samples_are_plain_json_without_secrets_or_controls(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "correct horse battery")
    tracker = JsonlTracker(folder)
    row = {
        "prompt": "say correct horse battery",
        "answer": "a\x9b31m\udc80 \n b",
        "reward": float("inf"),
        "parts": [float("nan")],
    }
    tracker.log_samples(3, [row])
    tracker.finish("done")
    raw = folder.samples.read_bytes()
    assert b"horse" not in raw and b"\xc2\x9b" not in raw and raw.count(b"\n") == 1
    assert lines(folder.samples) == [
        {"step": 3, "prompt": "say ***", "answer": "a\x9b31m\udc80 \n b", "reward": None, "parts": [None]}
    ]


def test_cut_back_keeps_what_is_before_and_moves_what_is_after(folder: RunFolder) -> None:
    write(folder, 1, 9)
    assert truncate_after(folder, 6, 2) == 3
    assert [line["step"] for line in lines(folder.metrics)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(folder.attempts / "2/metrics.jsonl")] == [7, 8, 9]
    assert [line["step"] for line in lines(folder.attempts / "2/samples.jsonl")] == [7, 7, 8, 8, 9, 9]
    write(folder, 7, 8)
    assert [line["step"] for line in lines(folder.metrics)] == list(range(1, 9))


@settings(max_examples=40)
@given(st.data())
def test_a_file_torn_anywhere_is_cut_back_to_whole_lines_and_nothing_is_lost(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        write(folder, 1, 6)
        whole = folder.metrics.read_bytes()
        torn = whole[: data.draw(st.integers(0, len(whole)))]
        step = data.draw(st.integers(1, 6))
        folder.metrics.write_bytes(torn)
        truncate_after(folder, step, 2)
        once = folder.metrics.read_bytes()
        truncate_after(folder, step, 2)
        assert folder.metrics.read_bytes() == once
        kept = folder.attempts / "2/metrics.jsonl"
        rest = kept.read_bytes() if kept.exists() else b""
        assert (once + rest).rstrip(b"\n") == torn.rstrip(b"\n")
        steps = [line["step"] for line in lines(folder.metrics)]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) == min(step, torn.count(b"}"))
        JsonlTracker(folder).finish("done")


def test_nothing_to_cut_writes_nothing(folder: RunFolder) -> None:
    assert truncate_after(folder, 3, 2) == 0
    write(folder, 1, 3)
    before = folder.metrics.stat().st_ino
    assert truncate_after(folder, 3, 2) == 0
    assert folder.metrics.stat().st_ino == before and not folder.attempts.exists()


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([1, 2, 3, 4, 5, 6], ""),
        ([1, 3, 4], "missing step 2, steps 5 to 6"),
        ([], "missing steps 1 to 6"),
        ([1, 2, 4, 3, 5, 6], "its steps are not in order"),
        ([1, 2, 2, 3, 5, 6], "missing step 4; its steps are not in order"),
    ],
)
def test_lines_that_are_missing_after_a_crash_are_counted(folder: RunFolder, kept: list[int], said: str) -> None:
    write(folder, 1, 8)
    rows = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join([rows[step - 1] for step in kept] + rows[6:]))
    truncate_after(folder, 6, 2)
    assert missing_steps(folder, 6) == said


def test_a_run_that_wrote_nothing_lacks_nothing_at_step_0(folder: RunFolder) -> None:
    assert missing_steps(folder, 0) == "" and missing_steps(folder, 1) == "missing step 1"


def test_a_run_that_begins_anew_keeps_no_sample_of_before(folder: RunFolder) -> None:
    tracker = JsonlTracker(folder)
    tracker.log_samples(0, [{"prompt": "before training"}])
    tracker.log(1, {})
    tracker.finish("failed")
    assert truncate_after(folder, 0, 2) == 1
    assert folder.metrics.read_text() == folder.samples.read_text() == ""
    assert lines(folder.attempts / "2/samples.jsonl") == [{"step": 0, "prompt": "before training"}]


def test_samples_from_before_the_first_step_stay_at_a_resume(folder: RunFolder) -> None:
    tracker = JsonlTracker(folder)
    tracker.log_samples(0, [{"prompt": "before training"}])
    tracker.finish("failed")
    truncate_after(folder, 1, 2)
    assert len(lines(folder.samples)) == 1


def test_the_same_attempt_adds_to_what_it_kept(folder: RunFolder) -> None:
    write(folder, 1, 3)
    truncate_after(folder, 2, 2)
    write(folder, 3, 5)
    truncate_after(folder, 3, 2)
    assert [line["step"] for line in lines(folder.attempts / "2/metrics.jsonl")] == [3, 4, 5]


@pytest.mark.parametrize("damage", [b'{"step": 3, "tr', b"\xff\xfe\n", b"[1]\n"])
def test_a_damaged_line_is_refused_until_it_is_cut(folder: RunFolder, damage: bytes) -> None:
    write(folder, 1, 2)
    folder.metrics.write_bytes(folder.metrics.read_bytes() + damage)
    with pytest.raises(RunnerError, match="the file first"):
        JsonlTracker(folder)
    assert truncate_after(folder, 2, 2) == 1
    JsonlTracker(folder).finish("done")


WRITER = """
import sys
from pathlib import Path
from runner.run_dir.folder import RunFolder
from runner.tracker.jsonl import JsonlTracker
tracker = JsonlTracker(RunFolder(Path(sys.argv[1])))
for step in range(1, 10**9):
    tracker.log(step, {f"metric/{i}": step / 7 for i in range(20)})
    print(step, flush=True)
"""


def test_kill_9_leaves_whole_lines_only_and_none_is_missing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(200):
            writer.stdout.readline()
        writer.kill()
        said = writer.stdout.read().splitlines()
    found = [line["step"] for line in lines(tmp_path / "metrics.jsonl")]
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= int(said[-1] if said else 200)


FULL = """
import resource, sys
from pathlib import Path
from runner.core.errors import StorageError
from runner.run_dir.folder import RunFolder
from runner.tracker.jsonl import JsonlTracker
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
tracker = JsonlTracker(RunFolder(Path(sys.argv[1])))
try:
    for step in range(1, 1000):
        tracker.log(step, {"train/loss": 1 / step})
except StorageError as error:
    print(error)
"""


def test_a_file_that_cannot_grow_is_a_storage_error_and_can_be_resumed(folder: RunFolder) -> None:
    command = [sys.executable, "-c", FULL, str(folder.root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "file is larger than" in done.stdout and "run resume" in done.stdout
    assert not folder.metrics.read_text().endswith("\n")
    assert truncate_after(folder, 5, 2) > 0
    assert [line["step"] for line in lines(folder.metrics)] == [1, 2, 3, 4, 5]


def test_tail_returns_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = JsonlTail(path)
    assert tail.lines() == []
    with path.open("w") as file:
        for text, expected in (('{"a": 1}\n{"a"', [{"a": 1}]), (": 2", []), ("}\n", [{"a": 2}]), ("", [])):
            file.write(text)
            file.flush()
            assert tail.lines() == expected
    long = {"a": "x" * 3_000_000}
    with path.open("a") as file:
        file.write(json.dumps(long) + "\n" + '{"a": 3}\n')
    assert [*tail.lines(), *tail.lines()] == [long, {"a": 3}]


def test_the_samples_of_a_step_are_logged_once_however_they_arrive(tmp_path: Path) -> None:
    logged: list[tuple[int, int]] = []

    class Recording:
        after = 0

        def log(self, step: int, values: Any) -> None: ...

        def log_samples(self, step: int, rows: Any) -> None:
            logged.append((step, len(rows)))

    file = tmp_path / "samples.jsonl"
    lines = FeedLines(cast(Feed, Recording()), tmp_path)
    for step, count in ((1, 2), (1, 1), (2, 3)):
        with file.open("a") as out:
            out.write((json.dumps({"step": step, "answer": "x"}) + "\n") * count)
        lines.feed_new_lines()
    assert logged == [(1, 3)]
    lines.feed_new_lines(at_end=True)
    assert logged == [(1, 3), (2, 3)]
