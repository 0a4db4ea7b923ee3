"""An export is the old one or the new one, whole, whatever goes wrong on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from runner.cli.job_builder import compose_job
from runner.core.errors import StorageError
from runner.core.fsync_io import recover_folder
from runner.launch.export import CardFacts, write_export

SPEC = compose_job(["+recipe=sft_demo"]).spec


class Toy:
    """A model of one number; `fault` is raised in the middle of its writing."""

    inner = SimpleNamespace(config=Qwen2Config())

    def __init__(self, value: float, fault: Exception | None = None) -> None:
        self.value, self.fault = value, fault

    def save(self, folder: Path) -> None:
        folder.mkdir()
        save_file({"w": torch.tensor(self.value)}, folder / "model.safetensors")
        if self.fault:
            raise self.fault
        (folder / "config.json").write_text("{}")


def value(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["w"])


def test_a_newer_export_takes_the_place_of_the_older_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "export"
    write_export(Toy(1.0), target, SPEC, CardFacts(1, {"eval/loss": 0.25}))
    (target / "of_the_older").touch()
    write_export(Toy(2.0), target, SPEC, CardFacts(2, {"eval/loss": 0.125}))
    assert value(target) == 2.0 and not (target / "of_the_older").exists()
    assert "| eval/loss | 0.125 |" in (target / "README.md").read_text()
    assert [p.name for p in target.parent.iterdir()] == ["export"]


def test_every_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_export(Toy(1.0), tmp_path / "export", SPEC, CardFacts(1, {}))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()} == {0o640}


def test_the_card_names_no_folder_of_this_machine_and_no_adapter_where_there_is_none(tmp_path: Path) -> None:
    local = compose_job(["model=hf", "model.path=/models/base", "data=demo"]).spec
    write_export(Toy(1.0), tmp_path / "export", local, CardFacts(1, {}))
    front = (tmp_path / "export" / "README.md").read_text().split("---")[1]
    assert "base_model" not in front and "- none" not in front
    hub = compose_job(["model=hf", "model.path=owner/base", "data=demo", "adapter=lora"]).spec
    write_export(Toy(1.0), tmp_path / "export", hub, CardFacts(1, {}))
    assert "base_model: owner/base" in (tmp_path / "export" / "README.md").read_text()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("I/O error")], ids=type)
def test_a_fault_is_a_storage_error_and_leaves_the_older(tmp_path: Path, fault: Exception) -> None:
    target = tmp_path / "export"
    write_export(Toy(1.0), target, SPEC, CardFacts(1, {}))
    with pytest.raises(StorageError, match=r"cannot write the export .*run export"):
        write_export(Toy(2.0, fault), target, SPEC, CardFacts(2, {}))
    assert value(target) == 1.0 and [p.name for p in tmp_path.iterdir()] == ["export"]


def test_a_file_in_the_way_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "export").write_text("mine")
    with pytest.raises(StorageError, match="exists and") as caught:
        write_export(Toy(1.0), tmp_path / "export", SPEC, CardFacts(1, {}))
    assert caught.value.exit_code == 7 and (tmp_path / "export").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_a_storage_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="Permission denied"):
            write_export(Toy(1.0), tmp_path / "export", SPEC, CardFacts(1, {}))
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("point", "left", "then"),
    [("before_renames", 1.0, 1.0), ("between_renames", None, 1.0), ("after_renames", 2.0, 2.0)],
)
def test_a_kill_at_any_point_loses_neither_version(tmp_path: Path, point: str, left: float | None, then: float) -> None:
    target, staged = tmp_path / "it", tmp_path / "staged"
    for folder, number in ((target, 1.0), (staged, 2.0)):
        Toy(number).save(folder)
    program = (
        "import pathlib, sys; from runner.core.fsync_io import *; replace_folder(*map(pathlib.Path, sys.argv[1:]))"
    )
    environment = os.environ | {"RUNNER_FAILPOINT": f"replace_folder.{point}:kill"}
    done = subprocess.run([sys.executable, "-c", program, staged, target], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL and (value(target) if target.exists() else None) == left
    recover_folder(target)
    assert value(target) == then
    write_export(Toy(3.0), target, SPEC, CardFacts(1, {}))
    assert value(target) == 3.0 and not list(tmp_path.glob(".*"))


def test_a_rename_that_fails_puts_the_older_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_export(Toy(1.0), tmp_path / "export", SPEC, CardFacts(1, {}))
    monkeypatch.setenv("RUNNER_FAILPOINT", "replace_folder.between_renames:EIO")
    with pytest.raises(StorageError):
        write_export(Toy(2.0), tmp_path / "export", SPEC, CardFacts(1, {}))
    assert value(tmp_path / "export") == 1.0 and len(list(tmp_path.iterdir())) == 1
