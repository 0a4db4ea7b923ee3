"""The upload process against the real `swanlab`, offline: what its own reader finds, and what a fault leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.tracker.config import SwanlabConfig
from runner.tracker.jsonl import truncate_after
from tests.tracker.test_wandb import KEY, PROMPT_S, Run, ended_runs, expected, server, survivors  # noqa: F401

pytest.importorskip("swanlab")


def copy_of(root: Path) -> Path:
    """The one current offline copy."""
    [found] = (root / "swanlab").glob("run-*")
    return found


def records(root: Path) -> list[Any]:
    """All records of that copy, in order."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    [path] = copy_of(root).glob("*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    found = []
    while (content := reader.scan()) is not None:
        record = Record()
        record.ParseFromString(content)
        found.append(record)
    reader.close()
    return found


def history(root: Path, key: str = "train/loss") -> dict[int, float]:
    rows = [
        (r.scalar.step, r.scalar.value.number) for r in records(root) if r.HasField("scalar") and r.scalar.key == key
    ]
    assert len(rows) == len(dict(rows)), "a step was written twice"
    return dict(rows)


def test_all_that_was_logged_is_read_back_and_no_secret_is_on_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SWANLAB_API_KEY", KEY)
    run = Run(tmp_path / "run", kind=SwanlabConfig)
    for step in range(1, 41):
        values = {"train/loss": 1 / step, "policy/entropy": 0.5, "eval/loss": float("nan")}
        run.jsonl.log(step, values)
        run.timed(lambda s=step, v=values: run.tracker.log(s, v))
    run.sample(40, [{"prompt": "2+2", "answer": "4", "exact": True}, {"prompt": "key?", "answer": KEY, "reward": 0.5}])
    line = run.finish()
    copy = copy_of(tmp_path / "run")
    assert line == f"upload    swanlab sync {copy}  # offline"
    assert run.is_prompt()
    assert history(tmp_path / "run") == expected(40)
    assert history(tmp_path / "run", "health/entropy") == dict.fromkeys(range(1, 41), 0.5)
    assert history(tmp_path / "run", "eval/loss") == {}
    [start] = [r.start for r in records(tmp_path / "run") if r.HasField("start")]
    assert (start.id, start.project, start.name, list(start.tags)) == ("toy-1", "p", "toy", ["t"])
    config = yaml.safe_load((copy / "files/config.yaml").read_text())
    assert config["optimizer"]["value"] == {"lr": 1e-3}
    texts = [path.read_text() for path in (copy / "media/text").iterdir()]
    assert len(texts) == 2 and any('"answer": "***"' in text for text in texts)
    [end] = [r.finish for r in records(tmp_path / "run") if r.HasField("finish")]
    assert end.error == ""
    assert [p for p in tmp_path.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()] == []
    assert survivors(tmp_path / "run") == []


def test_a_resumed_run_has_the_same_id_and_each_step_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind=SwanlabConfig)
    run.steps(1, 12)
    run.finish("interrupted")
    [end] = [r.finish for r in records(tmp_path / "run") if r.HasField("finish")]
    assert end.error == "the run failed"
    truncate_after(run.folder, 8, 2)
    again = Run(tmp_path / "run", first=8, kind=SwanlabConfig)
    again.steps(9, 20)
    again.finish()
    assert history(tmp_path / "run") == expected(20)
    assert [r.start.id for r in records(tmp_path / "run") if r.HasField("start")] == ["toy-1"]
    assert len(list((tmp_path / "run/swanlab/superseded").iterdir())) == 1


def test_a_killed_upload_process_is_started_again_and_leaves_nothing_out(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", kind=SwanlabConfig)
    run.steps(1, 10)
    before, _ = run.pid(), run.opened()
    os.kill(before, signal.SIGKILL)
    run.wait_for(lambda: run.pid() != before)
    run.steps(11, 20)
    run.finish()
    assert "swanlab  the upload process exited with code -9; restarting it" in run.screen.getvalue()
    assert history(tmp_path / "run") == expected(20)
    assert survivors(tmp_path / "run") == []


@pytest.mark.slow
def test_a_stopped_upload_process_is_ended_at_the_deadline(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", deadline_s=1.0, kind=SwanlabConfig)
    run.steps(1, 10)
    run.opened()
    os.kill(run.pid(), signal.SIGSTOP)
    begin = time.monotonic()
    assert "incomplete" in run.finish()
    assert time.monotonic() - begin < 1.0 + PROMPT_S
    assert survivors(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "key", "said"), [("refuses", KEY, "cannot be reached"), ("answers", "", "API key")])
def test_online_without_a_server_or_a_key_becomes_offline(
    tmp_path: Path, monkeypatch: Any, kind: str, key: str, said: str
) -> None:
    with server(kind) as address:
        monkeypatch.setenv("SWANLAB_API_HOST", address)
        monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc of the user's
        if key:
            monkeypatch.setenv("SWANLAB_API_KEY", key)
        run = Run(tmp_path / "run", mode="online", kind=SwanlabConfig)
        run.steps(1, 10)
        run.opened()
        run.steps(11, 20)
        line = run.finish()
    [decision] = run.decide.entries
    assert (decision.feature, decision.wanted, decision.got) == ("tracker.mode", "online", "offline")
    assert said in decision.reason
    assert line.startswith("upload    swanlab sync ") and line.endswith("  # offline")
    assert history(tmp_path / "run") == expected(20)
