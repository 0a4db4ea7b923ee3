"""What the end of an attempt leaves: status.json, and the run's page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import Interrupted, RunnerError
from runner.launch import local
from runner.launch.rank_main import load_spec
from runner.launch.run_records import RunRecords, status_of, write_spec
from runner.run_dir.folder import RunFolder, read_mapping
from runner.tracker import uploader
from runner.tracker.console import Console
from runner.tracker.jsonl import NoTracker


@pytest.fixture
def folder(workdir: Path) -> RunFolder:
    """That of a run whose first step is recorded."""
    folder = RunFolder(workdir)
    folder.spec.write_text(yaml.safe_dump(compose_job(["+recipe=sft_demo"]).data))
    folder.metrics.write_text('{"step": 1, "train/loss": 2.5}\n')
    return folder


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Interrupted(15, "SIGTERM after step 1"), "interrupted"),
        (RunnerError("too bad"), "failed"),
        (ZeroDivisionError("a bug"), "failed"),
    ],
)
def test_a_run_that_did_not_finish_has_a_page_that_is_named(
    error: Exception, state: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), status_of(folder, 1):
        raise error
    page = folder.report.read_text()
    assert f"{state} · step 1/200" in page and str(error) in page
    assert capsys.readouterr().out == "report    report.html\n"


def test_a_run_without_a_step_has_a_page_that_is_not_named(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.metrics.unlink()
    with pytest.raises(RunnerError), status_of(folder, 1):
        raise RunnerError("no such data")
    assert "no such data" in folder.report.read_text() and capsys.readouterr().out == ""


@pytest.mark.parametrize("spec", ["name: [", "- 1\n", None], ids=["no YAML", "no mapping", "no file"])
def test_a_page_that_cannot_be_written_is_a_warning_and_the_run_is_done(
    spec: str | None, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.spec.unlink() if spec is None else folder.spec.write_text(spec)
    with status_of(folder, 1):
        pass
    assert json.loads(folder.status.read_text())["state"] == "done" and not folder.report.exists()
    [line] = caplog.messages
    assert line.startswith("report.html is not written: ") and "; write it again: run report " in line


def test_the_error_that_ended_a_run_is_raised_where_its_folder_is_gone(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = RunFolder(folder.root / "run")
    elsewhere.root.mkdir()
    with pytest.raises(RunnerError, match="too bad"), status_of(elsewhere, 1):
        shutil.rmtree(elsewhere.root)
        raise RunnerError("too bad")
    assert "status.json: No such file or directory" in caplog.text


@pytest.mark.parametrize("name", ["e\x1b[31m\x9b", "two\nlines: ["])
def test_the_spec_of_a_folder_with_an_odd_name_can_be_read(name: str, workdir: Path) -> None:
    (workdir / name).mkdir()
    folder = RunFolder(workdir / name)
    write_spec(folder, compose_job(["+recipe=sft_demo"]).spec)
    assert read_mapping(folder.spec)["name"] == "sft_demo"


def test_ranks_trust_the_code_that_their_launcher_trusts(tmp_path: Path) -> None:
    spec = compose_job(["model=hf", "model.path=x/y", "model.trust_remote_code=true", "data=demo"]).spec
    write_spec(RunFolder(tmp_path), spec)
    assert load_spec(RunFolder(tmp_path)) == spec


def test_a_run_has_one_id_at_a_tracker_which_no_other_run_has(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "UploadTracker", lambda *_: NoTracker())
    job = compose_job(["+recipe=sft_demo", "tracker=wandb"])

    def run_id(spec: object, folder: RunFolder, attempt: int, typed: object = None) -> int:
        records = RunRecords(job.spec, folder, attempt, Decisions())
        records.open(0, Console(folder.log))
        assert records.close("done") == []
        seen.append(read_mapping(folder.root / "wandb" / "sink.json")["run_id"])
        return 0

    seen: list[str] = []
    monkeypatch.setattr(local, "begin_attempt", run_id)
    for where in ("a/exp", "a/exp", "b/a/exp"):
        shutil.rmtree(where, ignore_errors=True)
        local.start_run(job.spec, [], {}, Path(where))
        assert seen[-1].startswith("a-exp-")
        run_id(job.spec, RunFolder(Path(where).absolute()), 2)
        assert seen[-1] == seen[-2], "a resumed run"
    assert len(set(seen)) == 3
    local.start_run(job.spec, [], {})
    latest = (workdir / "outputs/latest").resolve()
    assert seen[-1] == f"{latest.parent.name}-{latest.name}", "is unique by itself"
    (workdir / "a/exp/overrides.yaml").write_text("typed: []\n")
    run_id(job.spec, RunFolder(workdir / "a/exp"), 2)
    assert seen[-1] == "a-exp", "of a folder that an older version wrote"
