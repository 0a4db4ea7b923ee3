"""Where a teacher comes from: a run, a folder, a recipe that is run first, or the hub; and that a resume keeps it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.launch.upstream_runs import resolve_other_models
from runner.spec.job import JobSpec
from tests.inference.model_folders import write_adapter, write_base

OFFLINE = ("algorithm=distill", "model=tiny", "data=demo")
SMALL = ("model.hidden_size=32", "model.intermediate_size=48", "model.layers=1", "tracker=none", "evaluation.every=0")
FEW = ("data.items=64", "data.held_out=8", "algorithm.batch_size=4")


def job(teacher: object, *more: str) -> JobSpec:
    return compose_job([*OFFLINE, f"algorithm.teacher={teacher}", *more]).spec


def taught(spec: JobSpec) -> str:
    return str(resolve_other_models(spec).algorithm.teacher)  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that has weights by its name; where a teacher comes from does not look into them."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "there"
    made.mkdir()
    (made / "model.safetensors").touch()
    (made / "tokenizer.json").touch()
    return made


def test_a_folder_or_the_export_in_a_runs_folder(folder: Path) -> None:
    assert taught(job("there")) == str(folder)
    run = folder.parent / "run"
    shutil.copytree(folder, run / "export")
    assert taught(job("run")) == str(run / "export")


@pytest.mark.parametrize("path", ["./typo", "/no/where", "there/typo", "a/b/c"])
def test_a_path_that_leads_nowhere_is_named(path: str, folder: Path) -> None:
    with pytest.raises(
        SpecError, match=r"algorithm\.teacher: no weights in .*; expected the folder of a finished run, an export"
    ):
        taught(job(path))


def test_an_adapter_over_its_base_is_a_teacher(folder: Path) -> None:
    base = write_base(folder.parent / "base")
    adapter = write_adapter(folder.parent / "adapter", base)
    assert taught(job("adapter")) == str(adapter), "its base has the tokenizer"


def test_a_folder_without_a_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        SpecError, match=r"algorithm\.teacher: .*there has no tokenizer \(tokenizer\*.*; copy its tokenizer"
    ):
        taught(job("there"))


def test_a_name_alone_is_no_hub_id(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"teacher: nonexistent: no such folder; a hub id looks like ORG/NAME"):
        taught(job("nonexistent"))


def test_a_hub_id_is_said_to_be_taken_as_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert taught(job("owner/name", "algorithm.teacher_revision=main")) == "owner/name"
    assert capsys.readouterr().err == "algorithm.teacher: no folder owner/name here, so it is read as a hub id\n"


def test_a_folder_has_no_revision(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"algorithm\.teacher_revision: not used with there; it is for a hub id"):
        taught(job("there", "algorithm.teacher_revision=main"))


def test_a_job_without_a_teacher_is_left_alone() -> None:
    spec = compose_job(["algorithm=sft", "model=tiny", "data=demo"]).spec
    assert resolve_other_models(spec) is spec


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_recipe_teaches_on_its_own_model_and_no_other_teacher_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine/recipe").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    choices = "defaults:\n  - override /algorithm: sft\n  - override /model: tiny\n"
    options = "name: quick\nsteps: 2\nmodel:\n  hidden_size: 48\n  layers: 1\nevaluation:\n  every: 0\n"
    (tmp_path / "recipes/quick.yaml").write_text(f"# @package _global_\n{choices}{options}")
    config = f"--config-dir={tmp_path / 'mine'}"
    done = run(tmp_path, *OFFLINE, *SMALL, *FEW, "steps=2", "algorithm.teacher=recipe:quick", config)
    assert done.returncode == 0, done.stderr
    assert f"algorithm.teacher: running +recipe=quick {config.replace('=', ' ')} first, on its own" in done.stderr
    [stage] = (tmp_path / "outputs/stages/quick").glob("*/")
    latest = (tmp_path / "outputs/latest").resolve()
    assert f"teacher: {stage.resolve()}/export" in (latest / "spec.yaml").read_text()
    assert (
        "hidden_size: 48" in (stage / "spec.yaml").read_text()
        and "hidden_size: 32" in (latest / "spec.yaml").read_text()
    )
    lines = [json.loads(line) for line in (latest / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("distill/divergence", 0) > 0] == [1, 2]

    again = run(tmp_path, *OFFLINE, *SMALL, *FEW, "steps=1", "seed=5")
    assert again.returncode == 2 and "algorithm.teacher: must be given" in again.stderr
    weights = stage / "export/model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    refused = run(tmp_path, "resume", str(latest), "steps=4")
    assert refused.returncode == 4, refused.stderr
    assert "another teacher: weights of algorithm.teacher: was" in refused.stderr
