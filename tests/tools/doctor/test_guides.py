"""The guides to NPUs: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.device.ascend import LAYOUTS, install_folders
from runner.tools.doctor.cann import PACKAGES
from runner.tools.doctor.versions import SETS, VersionSet

ROOT = Path(__file__).resolve().parents[3]
ENGLISH, CHINESE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("npu.md", "npu.zh.md"))


def commands(text: str) -> list[str]:
    """The lines of code blocks without their comments."""
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("one", [one for one in SETS if one.usable], ids=lambda one: one.name)
def test_the_table_of_versions_is_the_doctor_s(one: VersionSet) -> None:
    name = f"constraints/npu-{one.name}.txt"
    assert (ROOT / name).is_file()
    for text in (ENGLISH, CHINESE):
        [row] = [line for line in text.splitlines() if line.startswith("|") and name in line]
        assert [cell.strip() for cell in row.split("|")[-3:-1]] == [one.torch, one.torch_npu]


def test_places_and_packages_are_those_that_the_doctor_looks_for() -> None:
    assert f"source {install_folders({})[0]}/{LAYOUTS[0]}/set_env.sh" in ENGLISH
    [line] = [line for line in commands(ENGLISH) if line.startswith("pip install attrs")]
    assert set(line.split()[2:]) <= PACKAGES.keys(), "the others come with torch, torch_npu and wandb"


def test_every_recipe_for_an_npu_is_in_the_matrix() -> None:
    [row] = [line for line in ENGLISH.splitlines() if "recipes `*_npu`" in line]
    for recipe in (ROOT / "recipes").glob("*_npu.yaml"):
        assert re.search(rf"\b{recipe.stem.removesuffix('_npu')}\b", row), recipe.name


def test_states_are_three() -> None:
    for text, states in ((ENGLISH, {"simulated", "written", "not there"}), (CHINESE, {"已模拟", "已编写", "暂无"})):
        part = re.split(r"^## ", text, flags=re.MULTILINE)[5]
        rows = [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("|")][2:]
        assert set(rows) == states
