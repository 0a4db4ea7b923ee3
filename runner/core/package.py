"""The installed packages: ours with conf/, recipes/ and lazy imports; plug-ins by entry points.

An entry point that fails is left out, with one warning on the command line.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml

from runner.core.errors import RunnerError

COMPONENTS_GROUP = "runner.components"  # the entry points of components
PLUG_IN_GROUPS = (COMPONENTS_GROUP, "runner.losses", "runner.verbs")  # those of code
LEFT_OUT: dict[tuple[str, str], str] = {}  # group and name of an entry point that was left out → why
_FAILED: dict[str, dict[str, list[str]]] = {}  # package → why → names of its entry points

T = TypeVar("T")


def import_frozen(name: str) -> ModuleType:
    """Import a module with garbage collection off, and exempt all objects that exist then (`gc.freeze`).

    Modules live as long as the process. Otherwise the collector repeatedly scans their hundreds of thousands of
    objects, which takes a quarter of the CPU time of a first step. An imported module is returned unchanged.
    """
    if name in sys.modules:
        return sys.modules[name]
    enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def lazy_exports(namespace: dict[str, Any]) -> None:
    """Make the imports under a module's `if TYPE_CHECKING` available, each done when it is first used.

    namespace: the module's `globals()`
    """
    body = ast.parse(Path(namespace["__file__"]).read_text(encoding="utf-8")).body
    imports = [node for block in body if isinstance(block, ast.If) for node in block.body]
    found = [node for node in imports if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in found for alias in node.names}
    namespace["__all__"] = tuple(modules)

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        found = namespace[name] = getattr(importlib.import_module(modules[name]), name)
        return found

    namespace["__getattr__"] = find


def load_plugins(group: str, use: Callable[[EntryPoint], T]) -> Iterator[T]:
    """Apply `use` to each entry point of a group, in the order of package names.

    An entry point for which it raises is left out.
    """
    for point in sorted(entry_points(group=group), key=lambda one: (_distribution_name(one), one.name)):
        try:
            made = use(point)
        except (Exception, SystemExit) as error:  # a plug-in may fail in any way
            why = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
            LEFT_OUT[group, point.name] = f"the one of plug-in {_distribution_name(point)} is not loaded: {why}"
            _FAILED.setdefault(_distribution_name(point), {}).setdefault(why, []).append(point.name)
            continue
        yield made


def plugin_warnings() -> list[str]:
    """A warning for each plug-in with failed entry points: which, why, and what to type."""
    found = []
    for owner, failed in _FAILED.items():
        lines = [f"not loaded: {', '.join(names)} ({why})" for why, names in failed.items()]
        advice = f"fix it, or type: pip uninstall {owner}"
        found.append("\n  ".join([f"the plug-in {owner} is only partly loaded", *lines, advice]))
    return found


def plug_in_fault(error: BaseException) -> str | None:
    """Which plug-in raised an error, and where; None if this project did.

    The innermost frame counts that is this project's or a plug-in's.
    """
    points = [point for group in PLUG_IN_GROUPS for point in entry_points(group=group)]
    owners = {point.value.partition(":")[0].partition(".")[0]: _distribution_name(point) for point in points}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "runner":
            return None
        if package in owners:
            code = frame.f_code
            what = f"{type(error).__name__}: {error}"
            return f"the plug-in {owners[package]} raised {what}\n  {code.co_filename}:{line}, {code.co_name}"
    return None


def _distribution_name(point: EntryPoint) -> str:
    """The installed package that an entry point belongs to."""
    return point.dist.name if point.dist else point.value.partition(":")[0]


PACKAGE = Path(__file__).resolve().parent.parent


def read_table(module_file: str, name: str) -> Any:
    """The contents of a YAML file beside a module (its `__file__`).

    Uses libyaml if PyYAML has it, which is ten times as fast: several tables are read at every start.
    """
    text = Path(module_file).with_name(name).read_text(encoding="utf-8")
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()


def conf_dir() -> Path:
    """The shipped config groups."""
    return _shipped_dir("conf")


def recipes_dir() -> Path:
    """The shipped recipes."""
    return _shipped_dir("recipes")


def cache_folder() -> Path:
    """Cache of tokens, reference log-probabilities and plug-ins: $RUNNER_CACHE, else the user's cache."""
    if given := os.environ.get("RUNNER_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "runner")


def _shipped_dir(name: str) -> Path:
    # The wheel's copy comes first: site-packages may have another package's conf/ folder.
    installed = PACKAGE / f"_{name}"
    return installed if installed.is_dir() else PACKAGE.parent / name
