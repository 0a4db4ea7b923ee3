"""A third party's package adds a component, a preset and a recipe without touching the core."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import runner
from runner.reward.base import RewardConfig
from runner.spec.registry import GROUPS

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


def call_tests(file: Path, site: Path, monkeypatch: pytest.MonkeyPatch, **fixtures: object) -> list[str]:
    """Call the tests of a package's file in this process, where torch is there already; their names."""
    monkeypatch.syspath_prepend(site)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    for test in tests.values():
        test(**{name: fixtures[name] for name in inspect.signature(test).parameters})
    for cls in [cls for cls in RewardConfig.__subclasses__() if not cls.__module__.startswith("runner.")]:
        cls.summable = False  # or they could be parts of a sum in other tests
    return list(tests)


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


def test_a_broken_package_is_named_once_and_left_out(site: Path, workdir: Path) -> None:
    (workdir / "theirs.py").write_text("raise SystemExit('broken')")
    assert run(workdir, workdir, "list").stderr == "", "the module without its metadata is not loaded"
    path = os.pathsep.join([str(ROOT), str(workdir), str(site)])

    def started(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runner", *words]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)

    listed = started("list", "optimizer")
    assert (listed.returncode, "adamw" in listed.stdout) == (0, True)
    assert listed.stderr == (
        "warning: the plug-in theirs is only partly loaded\n"
        "  not loaded: theirs (SystemExit: broken)\n"
        "  not loaded: theirs (there is no package 'theirs' to take conf/ from)\n"
        "  fix it, or type: pip uninstall theirs\n"
    )
    chosen = started("--cfg", "job", "algorithm=theirs")
    why = "no algorithm named 'theirs'; the one of plug-in theirs is not loaded: SystemExit: broken"
    assert (chosen.returncode, why in chosen.stderr) == (2, True)


TAKEN = '''
from typing import ClassVar, Literal
from runner.spec import ComponentConfig, OptimizerConfig

class Mine(OptimizerConfig):
    """Mine."""
    factory: ClassVar[str] = "taken:build"
    name: Literal["adamw"] = "adamw"

class Typo(ComponentConfig):
    """A group that there is not."""
    group: ClassVar[str] = "optimiser"
    factory: ClassVar[str] = "taken:build"
    name: Literal["mine"] = "mine"

def explain(words):
    """A verb that there is."""
'''
POINTS = """
[runner.components]
adamw = taken:Mine
mine = taken:Typo
word = taken:explain
[runner.verbs]
explain = taken:explain
[runner.conf]
taken = nowhere
"""


def test_a_name_that_is_taken_is_said(workdir: Path) -> None:
    site = workdir / "site"
    (site / "taken-1.0.dist-info").mkdir(parents=True)
    (site / "taken.py").write_text(TAKEN)
    (site / "taken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: taken\nVersion: 1.0\n")
    (site / "taken-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    result = run(site, workdir, "help", "options")
    assert result.returncode == 0 and "adamw," in result.stdout
    [head, *lines] = result.stderr.splitlines()
    assert head == "warning: the plug-in taken is only partly loaded"
    assert sorted(lines) == [
        "  fix it, or type: pip uninstall taken",
        "  not loaded: adamw (two components are registered as optimizer=adamw: "
        "runner.optimizer.config.AdamWConfig, taken.Mine)",
        "  not loaded: explain (the verb 'explain' exists already)",
        "  not loaded: mine (there is no group 'optimiser' (" + ", ".join(GROUPS) + "))",
        "  not loaded: taken (there is no package 'nowhere' to take conf/ from)",
        "  not loaded: word (it is not a ComponentConfig)",
    ]


@pytest.mark.filterwarnings("ignore:Field name:UserWarning")  # pydantic's own, which lets the option be
@pytest.mark.parametrize("option", ["group", "factory", "problems"])
def test_an_option_that_hides_an_attribute_of_its_base_class_is_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"the option {option} of Mine hides an attribute of its base class; rename"):
        type("Mine", (RewardConfig,), {"__module__": __name__, "__annotations__": {option: str}, option: "x"})
