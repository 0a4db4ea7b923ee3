"""From a component's name to its config class, and from a config to its lazy factory.

A package adds a component by declaring its config class under the entry-point group
`runner.components`; nothing else is needed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from runner.core.errors import RunnerError
from runner.core.package import COMPONENTS_GROUP, load_plugins
from runner.spec.base import ComponentConfig

BUILT_IN = (
    "device", "parallelism", "model", "adapter", "data", "algorithm", "sampler", "reward", "environment", "optimizer",
    "schedule", "tracker", "checkpoint", "launch",
)  # fmt: skip
GROUPS = (*BUILT_IN, "callbacks")


class Registry:
    """(group, name) → config class; a config instance → its factory."""

    def __init__(self, classes: Iterable[type[ComponentConfig]] = ()) -> None:
        self._classes: dict[str, dict[str, type[ComponentConfig]]] = {}
        for cls in classes:
            self.register(cls)

    def register(self, cls: type[ComponentConfig]) -> type[ComponentConfig]:
        """Add a component; two components of one group may not share a name."""
        names = self._classes.setdefault(cls.group, {})
        name = cls.component_name()
        if names.setdefault(name, cls) is not cls:
            raise RunnerError(
                f"two components are registered as {cls.group}={name}: {_qualified_name(names[name])}, "
                f"{_qualified_name(cls)}"
            )
        return cls

    def groups(self) -> tuple[str, ...]:
        """All groups in registration order."""
        return tuple(self._classes)

    def classes(self, group: str) -> dict[str, type[ComponentConfig]]:
        """The config classes of one group by name."""
        return dict(self._classes.get(group, {}))

    def factory(self, config: ComponentConfig) -> Callable[..., Any]:
        """Import and return what builds `config`; this is where heavy imports happen."""
        return resolve(type(config).factory)


def _qualified_name(cls: type[ComponentConfig]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def resolve(path: str) -> Callable[..., Any]:
    """Import `"module:attribute"`, a path that is written in code and never in a config."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def source_location(function: Callable[..., Any]) -> str:
    """File, line and name of a function, for messages."""
    plain = inspect.unwrap(function)
    try:
        return f"{inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]}, {plain.__qualname__}"
    except (TypeError, OSError):  # a callable object, or code without a file
        return repr(plain)


def component_source(config: ComponentConfig) -> str:
    """The name of a component with the place of its factory, for messages."""
    return f"{config.group}={config.component_name()} ({source_location(resolve(type(config).factory))})"


def _load(point: EntryPoint) -> type[ComponentConfig]:
    """The config class of a plug-in's component. Raises RunnerError for anything else."""
    cls = point.load()
    if not (isinstance(cls, type) and issubclass(cls, ComponentConfig)):
        raise RunnerError("it is not a ComponentConfig")
    if (group := getattr(cls, "group", None)) not in GROUPS:
        raise RunnerError(f"there is no group {group!r} ({', '.join(GROUPS)})")
    return cls


def _built_in() -> Iterator[type[ComponentConfig]]:
    for group in (*BUILT_IN, "trainer"):  # whose components are callbacks
        yield from importlib.import_module(f"runner.{group}.config").COMPONENTS


def built_in_registry() -> Registry:
    """Every component of this package."""
    return Registry(_built_in())


@cache
def default_registry() -> Registry:
    """All built-in components and those of installed plug-ins; a broken plug-in is left out and named."""
    registry = Registry(cls.with_plugin_options() for cls in _built_in())
    for _ in load_plugins(COMPONENTS_GROUP, lambda point: registry.register(_load(point).with_plugin_options())):
        pass
    return registry
