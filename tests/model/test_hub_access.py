"""A model's path is judged before anything is made or loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.inference.model_source import resolve_model_path
from runner.launch.upstream_runs import resolve_other_models
from tests.inference.model_folders import write_base


@pytest.mark.parametrize("path", ["./typo", "/no/where", "models/typo", "a/b/c", "typo"])
def test_a_path_that_leads_nowhere_is_no_hub_id(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(SpecError, match=r"model\.path: .*no such folder"):
        resolve_model_path(path, "model.path")


def test_a_hub_id_is_said_to_be_taken_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("owner/name", "model.path") == "owner/name"
    assert capsys.readouterr().err == "model.path: no folder owner/name here, so it is read as a hub id\n"


def test_a_revision_of_modelscope_is_downloaded_and_its_folder_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, revision: str | None) -> str:
        return str(tmp_path / f"{name}@{revision}")

    for revision in ("v1", None):
        write_base(tmp_path / f"A/B@{revision}")
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.setenv("https_proxy", "http://proxy.invalid")  # behind one, the site itself is not tried
    words = ["algorithm=distill", "data=demo", "model=hf", "model.path=modelscope:A/B"]
    words.append("algorithm.teacher=modelscope:A/B")
    for revision, more in (("v1", ("model.revision=v1", "algorithm.teacher_revision=v1")), (None, ())):
        spec = resolve_other_models(compose_job([*words, *more]).spec)
        model = spec.model.with_resolved_source(resolve_model_path)
        teacher = spec.algorithm.frozen_models()["teacher"]
        assert model.source == teacher.path == str(tmp_path / f"A/B@{revision}")
        assert not model.problems(spec) and teacher.revision is None


def test_a_hub_id_keeps_its_revision_and_a_run_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+recipe=sft_demo", "model=hf", "model.path=A/B", "model.revision=v1"]
    model = compose_job(words).spec.model
    assert model.with_resolved_source(resolve_model_path) == model
    with pytest.raises(SpecError, match=r"model\.revision: latest is a folder, which has no revisions"):
        compose_job(["+recipe=sft_demo", "model=hf", "model.path=latest", "model.revision=v1"])


def test_a_run_means_its_export(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").touch()
    with pytest.raises(SpecError, match="a run without an export; to write one, type: run export"):
        resolve_model_path(str(tmp_path), "model.path")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, tmp_path / "export" / "model.safetensors")
    for path in (tmp_path, tmp_path / "export"):
        assert resolve_model_path(str(path), "model.path") == str(tmp_path / "export")


def test_an_export_that_is_older_than_the_newest_checkpoint_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test_a_run_means_its_export(tmp_path)
    (tmp_path / "export" / "README.md").write_text("| step | 5 of 9 |\n")
    for step, said in (
        (5, ""),
        (9, "export of step 5, older than its newest checkpoint, 9; to export that"),
    ):
        manifest = tmp_path / "checkpoints" / f"step-{step}" / "MANIFEST.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        resolve_model_path(str(tmp_path), "model.path")
        found = capsys.readouterr().err
        assert said in found and bool(said) == bool(found)
