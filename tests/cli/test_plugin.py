"""A third party's package adds a component, a preset and a recipe without touching the core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import runner

ROOT = Path(runner.__file__).resolve().parent.parent
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "theirs"
version = "1.0"
[project.entry-points."runner.components"]
theirs = "theirs:TheirsConfig"
[project.entry-points."runner.conf"]
theirs = "theirs"
"""
RECIPE = "# Their demo.\ndefaults: [sft_demo, override /algorithm: theirs]\nname: their_demo\n"
MODULE = '''
from typing import ClassVar, Literal
from pydantic import Field
from runner.algorithm.config import AlgorithmConfig

class TheirsConfig(AlgorithmConfig):
    """Their own algorithm."""
    factory: ClassVar[str] = "theirs:build"
    name: Literal["theirs"] = "theirs"
    sharpness: float = Field(default=2.5, gt=0, description="How sharp.")
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is built and installed, with nothing downloaded."""
    source = tmp_path_factory.mktemp("source")
    (source / "pyproject.toml").write_text(PROJECT)
    for path, text in {
        "__init__.py": MODULE,
        "conf/data/theirs.yaml": "# Their data.\ndefaults: [file, _self_]\npath: their.jsonl\n",
        "recipes/their_demo.yaml": RECIPE,
    }.items():
        (source / "theirs" / path).parent.mkdir(parents=True, exist_ok=True)
        (source / "theirs" / path).write_text(text)
    target = tmp_path_factory.mktemp("site")
    flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", target, source], check=True)
    return target


def run(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    return subprocess.run([sys.executable, "-m", "runner", *words], cwd=cwd, env=env, capture_output=True, text=True)


def test_it_is_listed(site: Path, workdir: Path) -> None:
    shown = run(site, workdir, "list", "algorithm").stdout.splitlines()
    assert ["theirs", "Their own algorithm."] in [line.split(maxsplit=1) for line in shown]
    shown = run(site, workdir, "list", "data").stdout.splitlines()
    assert ["theirs", "Their data."] in [line.split(maxsplit=1) for line in shown]
    assert "Their demo." in run(site, workdir, "list", "recipe").stdout


def test_it_composes_by_name_and_through_its_recipe(site: Path, workdir: Path) -> None:
    plain = run(site, workdir, "--cfg", "job", "algorithm=theirs", "data=theirs", "algorithm.sharpness=3")
    assert plain.returncode == 0, plain.stderr
    job = yaml.safe_load(plain.stdout)
    assert job["algorithm"] == {
        "name": "theirs",
        "batch_size": 32,
        "mini_batches": 1,
        "micro_batch_tokens": 4096,
        "sharpness": 3.0,
    }
    assert job["data"]["path"] == "their.jsonl"
    recipe = yaml.safe_load(run(site, workdir, "--cfg", "job", "+recipe=their_demo").stdout)
    assert (recipe["name"], recipe["algorithm"]["name"], recipe["algorithm"]["batch_size"]) == (
        "their_demo",
        "theirs",
        64,
    )


def test_its_options_are_judged_and_explained(site: Path, workdir: Path) -> None:
    wrong = run(site, workdir, "algorithm=theirs", "algorithm.sharpnes=3")
    assert (wrong.returncode, "did you mean 'sharpness'?" in wrong.stderr) == (2, True)
    assert "meaning  How sharp." in run(site, workdir, "explain", "algorithm.sharpness", "algorithm=theirs").stdout


def test_a_broken_package_is_named(site: Path, workdir: Path) -> None:
    (workdir / "theirs.py").write_text("raise RuntimeError('broken')")
    result = run(workdir, workdir, "list")  # the module without its metadata: nothing is loaded
    assert result.returncode == 0
    result = subprocess.run(
        [sys.executable, "-m", "runner", "list"],
        cwd=workdir,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(workdir), str(site)])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "the plug-in theirs" in result.stderr and "pip uninstall theirs" in result.stderr
