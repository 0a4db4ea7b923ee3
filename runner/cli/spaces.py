"""The space of a search: intervals, ranges and choices, on the command line or in a recipe's sweep.over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep

from runner.cli.axes import axis_of, sweeps_in, values_in
from runner.cli.compose import Draft
from runner.cli.overrides import problem
from runner.cli.sources import GROUP
from runner.cli.sweep_options import OVER, axes_of
from runner.errors import Problem
from runner.spec.origin import origin_of
from runner.sweep.space import Dimension

TAGS = frozenset({"log", "int"})


def space_in(words: Sequence[str], loader: ConfigLoader) -> tuple[list[Dimension], list[str], list[Problem]]:
    """The words with several values as dimensions, the other words, and what is wrong with a dimension."""
    sweeps, fixed = sweeps_in(words, loader)
    space, problems = list[Dimension](), list[Problem]()
    for override in sweeps:
        dimension = _dimension(override)
        text = _wrong(dimension) or _strange(override, dimension)
        space += [] if text else [dimension]
        problems += [problem(dimension.key, text)] if text else []
    return space, fixed, problems


def recipe_space(
    draft: Draft, words: Sequence[str], loader: ConfigLoader, given: str
) -> tuple[list[Dimension], list[Problem]]:
    """The dimensions of a recipe's sweep.over, but for keys that the command line sets; `given` is the word that chose
    the recipe, if that is a dimension itself."""
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    space, problems = list[Dimension](), list[Problem]()
    for key, values in axes_of(draft).items():
        if key in typed:
            continue
        if isinstance(values, str) and key != GROUP:
            found, _, wrong = space_in([f"{key}={values}"], loader)
            text = wrong[0].message if wrong else "" if found else f"expected several values, got {values!r}"
        else:
            listed, text = values_in(key, values, loader)
            found = [Dimension(key, key, "choice", values=listed)]
        space += [] if text else [replace(one, given=given) for one in found]
        problems += [Problem(f"{OVER}.{key}", text, origin_of(OVER, draft.sweep_origins))] if text else []
    return space, problems


def _dimension(override: Override) -> Dimension:
    key, word, value = override.key_or_group, override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        low, high = value.start or 0, value.end or 0
        whole = "int" in value.tags or (isinstance(low, int) and isinstance(high, int))
        return Dimension(key, word, "int" if whole else "float", float(low), float(high), log="log" in value.tags)
    numbers = value.range() if isinstance(value, RangeSweep) else None
    if isinstance(value, RangeSweep) and isinstance(numbers, range) and numbers:
        ends = float(min(numbers)), float(max(numbers))
        return Dimension(key, word, "int", *ends, step=abs(numbers.step), log="log" in value.tags)
    return Dimension(key, word, "choice", values=axis_of(override).values)


def _strange(override: Override, dimension: Dimension) -> str:
    """A tag that says nothing here."""
    value = override.value()
    tags = value.tags if isinstance(value, Sweep) else set()
    if unknown := sorted(tags - TAGS):
        return f"tag({unknown[0]},…) means nothing here; there is {' and '.join(sorted(f'tag({t},…)' for t in TAGS))}"
    return "a tag is for an interval or a range, not for a choice" if tags and dimension.kind == "choice" else ""


def _wrong(dimension: Dimension) -> str:
    if dimension.kind == "choice":
        return "" if dimension.values else "matches nothing"
    if dimension.low > dimension.high:
        return f"an interval from {dimension.low:g} to {dimension.high:g} is empty; write interval(LOW,HIGH)"
    if dimension.log and (dimension.low <= 0 or dimension.step > 1):
        return "tag(log,…) needs an interval above 0, without steps"
    return ""
