"""Which wheels are gathered for a machine, from a folder in the place of a package index."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from tests.cuda import gather_wheels

FREEZE = "numpy==2.5.2\ntorch==2.11.0+cu130\nmine @ file:///opt/mine\n-e git+https://host/x#egg=y\nalone\n"
LIST = "Package    Version\n---------- -----------\nnumpy      2.5.2\nmy_package 1.0      /opt/my_package\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (FREEZE, {"numpy": Version("2.5.2"), "torch": Version("2.11.0+cu130"), "mine": None, "alone": None}),
        (LIST, {"numpy": Version("2.5.2"), "my-package": Version("1.0")}),
    ],
)
def test_what_pip_prints_is_understood(text: str, found: dict[str, Version | None]) -> None:
    assert gather_wheels.installed(text) == found


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_what_is_missing_is_gathered_with_what_it_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, folder, constraints = tmp_path / "index", tmp_path / "wheels", tmp_path / "constraints"
    for one in (index, folder, constraints):
        one.mkdir()
    (constraints / "cpu.txt").write_text("needed==1.0\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["asked>=1", "there", "old>=2", "wandb"]\n'
        '[project.optional-dependencies]\ndev = ["pytest>=9", "linter"]\n'
    )
    write_wheel(index, "asked", "1.0", "needed", 'never; python_version < "3.12"', 'extra_only; extra == "more"')
    write_wheel(index, "needed", "1.0", "there>=2")
    write_wheel(index, "needed", "2.0")
    write_wheel(index, "old", "2.0")
    monkeypatch.setattr(gather_wheels, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    there = gather_wheels.installed("there==3.0\nold==1.0\npytest==9.2.0\n")
    found = [wheel.name for wheel in gather_wheels.gather(there, folder)]
    assert found == ["asked-1.0-py3-none-any.whl", "old-2.0-py3-none-any.whl", "needed-1.0-py3-none-any.whl"]
    assert {wheel.name for wheel in folder.iterdir()} == set(found)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.whl").touch()
    monkeypatch.setattr("sys.argv", ["gather_wheels.py", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="is not empty"):
        gather_wheels.main()
