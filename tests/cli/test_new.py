"""`run new KIND NAME` writes a package that installs, passes its own test, and is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.cli.new import SKELETONS
from tests.cli.test_plugin import ROOT, call_tests


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one package of each kind installed, and beside it what was written."""
    place = tmp_path_factory.mktemp("new")
    before = Path.cwd()
    os.chdir(place)
    try:
        for kind in SKELETONS:
            assert main(["new", kind, f"my_{kind}"]) == 0
    finally:
        os.chdir(before)
    flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    packages = [str(place / f"my_{kind}") for kind in SKELETONS if kind != "environment"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", place / "site", *packages], check=True)
    return place / "site"


def python(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("kind", SKELETONS)
def test_each_package_passes_its_own_test(
    kind: str, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.parent / f"my_{kind}" / f"test_run_my_{kind}.py"
    assert call_tests(
        file, file.parent if kind == "environment" else site, monkeypatch, tmp_path=tmp_path, capsys=capsys
    ) == [f"test_{kind}"]


def test_each_module_is_short(site: Path) -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in site.parent.glob("my_*/run_my_*.py")}
    assert len(sizes) == len(SKELETONS) and max(sizes.values()) <= 40, sizes


def test_they_are_listed(site: Path, workdir: Path) -> None:
    shown = python(site, workdir, "-m", "runner", "list").stdout
    for kind in ("reward", "tracker", "callback", "optimizer"):
        assert f"  my_{kind} " in shown
    helped = python(site, workdir, "-m", "runner", "help")
    assert "print the newest numbers of a run; `run my_verb outputs/latest`" in helped.stdout
    assert helped.stderr == ""
    tried = python(site, workdir, "-m", "runner", "my_verb", "nowhere")
    assert (tried.returncode, tried.stdout) == (2, "nowhere/metrics.jsonl: no such file\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a kind and a name"),
        (["rewrad", "mine"], "did you mean 'reward'?"),
        (["reward", "2nd"], "'2nd' is not a valid name"),
        (["reward", "taken"], "taken exists"),
    ],
)
def test_what_cannot_be_written(words: list[str], said: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in workdir.iterdir()] == ["taken"]
