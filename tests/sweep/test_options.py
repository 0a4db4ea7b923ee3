"""Each option of a sweep is read by code that acts on it, and its files say what the class says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import runner.sweep
from runner.sweep.config import SweepConfig

PACKAGE = Path(runner.sweep.__file__).parent.parent
CLI = PACKAGE / "cli"
PLACES = [*sorted((PACKAGE / "sweep").rglob("*.py")), CLI / "sweep.py", CLI / "sweep_axes.py"]
READS = {
    node.attr
    for path in PLACES
    if path.name != "config.py"
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("options")
}


@pytest.mark.parametrize("name", [name for name in SweepConfig.model_fields if name != "over"])
def test_some_code_acts_on_it(name: str) -> None:
    assert name in READS


def test_the_axes_of_a_recipe_are_read() -> None:
    assert 'draft.sweep.get("over"' in (PACKAGE / "cli" / "sweep_axes.py").read_text()
