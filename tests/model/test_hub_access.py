"""A model's path is judged before anything is made or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.errors import SpecError
from runner.model.hub_access import check_path


@pytest.mark.parametrize("path", ["./typo", "/no/where", "models/typo", "a/b/c"])
def test_a_path_that_leads_nowhere_is_no_hub_id(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(SpecError, match="no such folder"):
        check_path(path)


@pytest.mark.parametrize("path", ["gpt2", "owner/name"])
def test_a_hub_id_is_said_to_be_taken_as_one(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check_path(path)
    assert capsys.readouterr().err == f"model.path: no folder {path} here, so taken as a hub id\n"


def test_the_folder_of_a_run_is_answered_with_its_export(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(SpecError, match=r"no config.json$"):
        check_path(str(tmp_path))
    (tmp_path / "export" / "config.json").touch()
    with pytest.raises(SpecError, match=f"did you mean {tmp_path}/export"):
        check_path(str(tmp_path))
    check_path(str(tmp_path / "export"))
