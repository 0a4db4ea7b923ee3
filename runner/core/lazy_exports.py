"""Names of a package that are imported from their modules when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


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
