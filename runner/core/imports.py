"""Large imports, out of the garbage collector's sight; names that are imported when they are first used."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def import_frozen(name: str) -> ModuleType:
    """Import a module with all that it imports while the collector rests, and exempt what exists then (`gc.freeze`).

    Modules live as long as the process. The collector would search their hundreds of thousands of objects again and
    again, and twice more at the end: a quarter of the processor time of a first step. A module that is there already
    is returned as it is.
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


def lazy_exports(namespace: dict[str, Any], homes: Mapping[str, str]) -> None:
    """Set a module's `__getattr__` and `__all__`; type checkers know its names from imports under TYPE_CHECKING.

    namespace: the module's `globals()`; homes: module → the names that it defines, separated by blanks
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}
    namespace["__all__"] = tuple(modules)

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        found = namespace[name] = getattr(importlib.import_module(modules[name]), name)
        return found

    namespace["__getattr__"] = find
