"""How long a sweep will take: founded on what has ended, and not known where nothing has."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import yaml

from runner.cli.job_builder import compose_job
from runner.launch.run_records import write_spec
from runner.run_dir.folder import RunFolder
from runner.sweep import plan as plans
from runner.sweep.plan import JobPlan, Plan, SweepState
from runner.sweep.progress import duration_words, estimated_time, find_earlier_run, first_done_line, remaining_s

SPEC = {"name": "a", "seed": 1, "steps": 10, "optimizer": {"name": "adamw", "lr": 0.1}, "tracker": {"name": "wandb"}}


def a_run(
    where: Path, seconds: float, host: str = "", state: str = "done", attempt: int = 1, **more: object
) -> RunFolder:
    """A run that took so long, in outputs/, as it leaves its folder."""
    where.mkdir(parents=True)
    folder = RunFolder(where)
    folder.spec.write_text(yaml.safe_dump({**SPEC, **more}))
    folder.status.write_text(json.dumps({"state": state, "attempt": attempt}))
    folder.manifest.write_text(json.dumps({"platform": {"host": host or socket.gethostname()}}))
    os.utime(folder.spec, (1e9, 1e9))
    os.utime(folder.status, (1e9 + seconds, 1e9 + seconds))
    return folder


def a_plan(axis: str, values: list[str], **more: object) -> Plan:
    section = axis.partition(".")[0]
    jobs = [
        JobPlan(i, {axis: value}, sections={section: int(value)} if axis == "steps" else {})
        for i, value in enumerate(values)
    ]
    return Plan("a", (), {**SPEC, **more}, jobs, {})


def test_a_run_that_differs_in_what_varies_tells_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert estimated_time(a_plan("optimizer.lr", ["1", "2", "3"]), None, 2) == "known after the first job"
    a_run(
        Path("outputs/2026-11-21/1-a"), 120.0, seed=7, tracker={"name": "none"}, optimizer={"name": "adamw", "lr": 3.0}
    )
    said = estimated_time(a_plan("optimizer.lr", ["1", "2", "3"]), None, 2)
    assert said == "about 4 min; outputs/2026-11-21/1-a took 2 min for 10 steps"
    assert estimated_time(a_plan("optimizer", ["adamw", "sgd"]), None, 1).startswith("about 4 min")
    assert estimated_time(a_plan("seed", ["1", "2"]), None, 2) == "known after the first job", (
        "its learning rate is another"
    )
    assert estimated_time(a_plan("recipe", ["a", "b"]), None, 2) == "known after the first job"
    a_run(Path("outputs/2026-11-21/2-a"), 120.0)
    said = estimated_time(a_plan("steps", ["10", "20", "40"]), None, 1)
    assert said == "about 14 min; outputs/2026-11-21/2-a took 2 min for 10 steps"


def test_a_few_steps_are_no_evidence_for_many(tmp_path: Path) -> None:
    a_run(tmp_path / "2026-11-21" / "1-a", 40.0, steps=3)
    assert find_earlier_run(a_plan("optimizer.lr", ["1"], steps=12), tmp_path) is not None
    assert find_earlier_run(a_plan("optimizer.lr", ["1"], steps=2000), tmp_path) is None
    a_run(tmp_path / "2026-11-21" / "2-a", 4000.0, steps=2000)
    assert find_earlier_run(a_plan("optimizer.lr", ["1"], steps=100), tmp_path) is None


@pytest.mark.parametrize("more", [{"host": "elsewhere"}, {"state": "failed"}, {"attempt": 2}, {"batch": 3}], ids=str)
def test_what_is_no_evidence(more: dict[str, object], tmp_path: Path) -> None:
    a_run(tmp_path / "2026-11-21" / "1-a", 120.0, **more)  # type: ignore[arg-type]
    assert find_earlier_run(a_plan("optimizer.lr", ["1"]), tmp_path) is None


def test_jobs_of_earlier_sweeps_and_stages_are_evidence(tmp_path: Path) -> None:
    stage = str(tmp_path / "stages" / "warm" / "0a1b" / "export")
    a_run(tmp_path / "sweeps" / "s" / "003", 20.0, init_from=stage)
    for recipe in ("recipe:warm", "recipe:warm --config-dir /conf"):
        found = find_earlier_run(a_plan("optimizer.lr", ["1"], init_from=recipe), tmp_path)
        assert found is not None and found.seconds == 2.0 and found.source.endswith("sweeps/s/003")
    assert find_earlier_run(a_plan("optimizer.lr", ["1"], init_from="recipe:other"), tmp_path) is None


def test_the_first_job_that_is_done_tells_the_time_to_go(tmp_path: Path) -> None:
    made = a_plan("optimizer.lr", ["1", "2", "3"])
    record = SweepState.create(plans.create_sweep_folder("a", tmp_path), 3)
    assert remaining_s(made, record, {}) is None and first_done_line(made, record, {}) == ""
    record.update(0, state="done", seconds=30.0)
    assert remaining_s(made, record, {}) == 60.0
    assert first_done_line(made, record, {}) == "time     about 60 s left: job 0 took 30 s"
    record.update(1, state="done", seconds=50.0)
    assert remaining_s(made, record, {}) == 40.0
    assert remaining_s(made, record, {}, trials=5) == 120.0, "two more are to come"
    record.update(2, state="failed")
    assert first_done_line(made, record, {}) == "", "nothing is left"


def test_times_are_spoken() -> None:
    times = {0.2: "1 s", 89: "89 s", 90: "2 min", 3599: "60 min", 3600: "1 h", 5400: "1 h 30 min", 200000: "2 d 7 h"}
    assert {seconds: duration_words(seconds) for seconds in times} == times


def test_a_saved_run_gives_the_estimate(tmp_path: Path) -> None:
    spec = compose_job(["+recipe=sft_demo", "optimizer.lr=0.25"]).spec
    spec = spec.model_copy(update={"chat": spec.chat.model_copy(update={"date": "2026-11-20"})})
    folder = a_run(tmp_path / "2026-11-21" / "1-a", 120.0)
    write_spec(folder, spec)
    os.utime(folder.spec, (1e9, 1e9))
    typed = compose_job(["+recipe=sft_demo", "optimizer.lr=0.5"]).spec.model_dump(mode="json")
    jobs = [JobPlan(0, {"optimizer.lr": "0.5"})]
    assert find_earlier_run(Plan("a", (), typed, jobs, {}), tmp_path) is not None
