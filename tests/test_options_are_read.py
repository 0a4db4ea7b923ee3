"""An option that nothing reads cannot exist: each field of each schema is read by code that acts on it."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import BaseModel

from runner.algorithm.loss_registry import built_in
from runner.interfaces.losses import INPUTS
from runner.spec.job import JobSpec
from runner.spec.registry import built_in_registry
from runner.spec.schema import groups_of, sections

PACKAGE = Path(__file__).resolve().parent.parent / "runner"
# These judge, print or store a config as a whole; reading an option here does nothing with it.
BYSTANDERS = ("cli", "spec")
# What a config is called where it is used, beside the names of the groups and sections themselves.
CALLED = {"config", "_config", "cfg", "spec", "job", "settings", "options"}


def owner(node: ast.expr) -> str:
    """The last name before the attribute: `self.config.lr` → `config`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def reads(path: Path) -> Iterator[tuple[str, str]]:
    """(what it is read from, name) for each attribute or key that a module reads; but not in `problems`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    judging = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "problems"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "compute_selected":
            config, option = node.args[:2]  # the registered function that an option names
            assert isinstance(option, ast.Constant)
            yield owner(config), str(option.value)
        if not isinstance(node, ast.Attribute | ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if isinstance(node, ast.Attribute) and id(node) not in judging:
            yield owner(node.value), node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield owner(node.value), str(node.slice.value)  # settings["project"], on the far side of a process


@cache
def readers() -> dict[str, set[tuple[str, str]]]:
    """(folder, what it is read from) of each place where an attribute is read, by its name."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in BYSTANDERS:
            for holder, attribute in reads(path):
                found[attribute].add((path.parent.name, holder))
    return dict(found)


@cache
def parameters_read() -> set[str]:
    """The options of registered losses that each function with such an option reads in its body."""
    found: set[str] = set()
    unread: set[str] = set()
    for one in (one for kind in INPUTS for one in built_in()[kind].values()):
        [tree] = ast.parse(dedent(inspect.getsource(one.function))).body
        assert isinstance(tree, ast.FunctionDef)
        names = {node.id for statement in tree.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
        found |= one.options.keys()
        unread |= one.options.keys() - names
    return found - unread


def is_read(section: str, field: str) -> bool:
    """Whether some code reads `field` from something that is called like a config of this section."""
    if section == "algorithm" and field in parameters_read():
        return True
    folders = groups_of(built_in_registry())
    return any(
        holder == section or (holder in CALLED | {"self"} and (folder == section or folder not in folders))
        for folder, holder in readers().get(field, ())
    )


def options() -> list[tuple[str, str]]:
    """Every (section, option), once."""
    found: dict[tuple[str, str], None] = {}
    classes: list[tuple[str, type[BaseModel]]] = [("", JobSpec), *sections().items()]
    classes += [(g, c) for g in groups_of(built_in_registry()) for c in built_in_registry().classes(g).values()]
    for section, cls in classes:
        found |= {(section, name): None for name in cls.model_fields if section == "" or name != "name"}
    return list(found)


@pytest.mark.parametrize(("section", "field"), options(), ids=lambda v: v)
def test_some_code_acts_on_it(section: str, field: str) -> None:
    assert is_read(section or "spec", field) or (section == "" and is_read("job", field))


def test_an_option_that_nothing_reads_would_be_noticed() -> None:
    assert not is_read("optimizer", "learning_rate_that_nobody_reads")
    assert not is_read("optimizer", "warmup_steps")  # read, but from a schedule
