"""`run report` and `run status`: which folders they refuse, and what they name instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.cli.main import main
from runner.sweep.plan import SweepFolder


@pytest.mark.parametrize("verb", ["report", "status"])
def test_several_folders_and_a_sweep_are_refused(verb: str, tmp_path: Path, capsys: Any) -> None:
    SweepFolder(tmp_path).plan.write_text("{}")
    assert main([verb, "a", "b"]) == main([verb, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"run {verb}: expected one run, latest or a folder; for a sweep: run sweep {verb} latest" in said
    assert f"is a sweep: run sweep {verb} {tmp_path}; a job of it: run {verb} {tmp_path}/000" in said
