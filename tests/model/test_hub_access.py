"""A model's path is judged before anything is made or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runner.core.errors import SpecError
from runner.inference.model_source import resolve_model_path


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
