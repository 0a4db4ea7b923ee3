"""The packages that plug-ins import from: what they name, and that naming it imports nothing heavy."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

# What a module with a config and a small component imports.
LIGHT = "BaseCallback, Callback, Completion, DataError, EnvironmentFactory, EnvironmentProblem, GroupScorer, "
LIGHT += (
    "Observation, Prompt, Request, Rollout, RunFolder, Sample, SamplerWrapper, ScoringFailures, State, StepResult, "
)
LIGHT += "UnscorableError, redact_values, require_column, score_each"


@pytest.mark.parametrize("name", ["runner.interfaces", "runner.spec"])
def test_type_checkers_and_python_see_the_same_names(name: str) -> None:
    module = importlib.import_module(name)
    [block] = [node for node in ast.parse(Path(str(module.__file__)).read_text()).body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(module.__all__) == seen.keys()
    for public, home in seen.items():
        assert getattr(module, str(public)) is getattr(importlib.import_module(str(home)), str(public))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_what_plug_ins_import_is_defined_in_interfaces_or_below() -> None:
    """Or modules imported one another through names for type checkers and lazy imports."""
    import runner.interfaces as interfaces

    modules = {
        getattr(node, "module", None) for node in ast.walk(ast.parse(Path(str(interfaces.__file__)).read_text()))
    }
    packages = {module.split(".")[1] for module in modules - {None, "typing", "__future__"}}
    assert packages == {"core", "interfaces", "run_dir", "spec"}


def test_a_component_is_described_without_torch() -> None:
    program = f"import sys; from runner.spec import *; from runner.interfaces import {LIGHT}; "
    program += "print({'torch', 'numpy', 'transformers', 'hydra'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )
