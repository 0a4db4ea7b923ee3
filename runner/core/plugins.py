"""Entry points of installed packages: one that cannot be used is left out, and the command line says so once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from runner.core.errors import RunnerError

LEFT_OUT: dict[tuple[str, str], str] = {}  # group and name of an entry point that was left out → why
_FAILED: dict[str, dict[str, list[str]]] = {}  # package → why → names of its entry points

T = TypeVar("T")


def load_plugins(group: str, use: Callable[[EntryPoint], T]) -> Iterator[T]:
    """What `use` makes of each entry point of a group, in the order of their packages' names; one for which it raises
    is left out."""
    for point in sorted(entry_points(group=group), key=lambda one: (_distribution_name(one), one.name)):
        try:
            made = use(point)
        except (Exception, SystemExit) as error:  # a foreign package may fail in any way
            why = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
            LEFT_OUT[group, point.name] = f"that of the plug-in {_distribution_name(point)} is left out: {why}"
            _FAILED.setdefault(_distribution_name(point), {}).setdefault(why, []).append(point.name)
            continue
        yield made


def plugin_warnings() -> list[str]:
    """For each package of which something was left out: what, why, and what to type."""
    return [
        "\n  ".join(
            [
                f"the plug-in {owner} is not used in full",
                *map(_line, failed.items()),
                f"fix it, or: pip uninstall {owner}",
            ]
        )
        for owner, failed in _FAILED.items()
    ]


def _line(failed: tuple[str, list[str]]) -> str:
    why, names = failed
    return f"left out: {', '.join(names)} ({why})"


def _distribution_name(point: EntryPoint) -> str:
    """The installed package that an entry point belongs to."""
    return point.dist.name if point.dist else point.value.partition(":")[0]
