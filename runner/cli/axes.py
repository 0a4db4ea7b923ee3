"""The axes of a sweep: keys with several values, on the command line (Hydra's grammar) or in a recipe's sweep.over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, Transformer
from hydra.errors import HydraException

from runner.cli.compose import Draft
from runner.cli.overrides import problem
from runner.cli.sources import GROUP
from runner.cli.sweep_options import OVER, axes_of
from runner.errors import Problem
from runner.spec.origin import origin_of


@dataclass(frozen=True, slots=True)
class Axis:
    """A key that varies: for each of its values the word that sets it, and the value as it is shown."""

    key: str
    values: tuple[tuple[str, str], ...]


def sweeps_in(words: Sequence[str], loader: ConfigLoader) -> tuple[list[Override], list[str]]:
    """The words with several values, and the others; what is wrong with those is said where a job's words are read."""
    sweeps, fixed = list[Override](), list[str]()
    parser = OverridesParser.create()
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            fixed.append(word)
            continue
        override.config_loader = loader  # a glob asks it for the names
        if override.is_sweep_override():
            sweeps.append(override)
        else:
            fixed.append(word)
    return sweeps, fixed


def axes_in(words: Sequence[str], loader: ConfigLoader) -> tuple[list[Axis], list[str], list[Problem]]:
    """The words with several values, the others, and what cannot be enumerated."""
    sweeps, fixed = sweeps_in(words, loader)
    axes, problems = list[Axis](), list[Problem]()
    for override in sweeps:
        if not override.is_discrete_sweep():
            text = "list the values (1e-4,3e-4), or write range(START,STOP,STEP); intervals are for sweep.search"
            problems.append(problem(override.key_or_group, text))
        else:
            axis = axis_of(override)
            axes.append(axis)
            problems += [] if axis.values else [problem(axis.key, f"{override.get_value_string()} matches nothing")]
    return axes, fixed, problems


def axis_of(override: Override) -> Axis:
    """What can be enumerated, as an axis."""
    values = [float(f"{v:.12g}") if isinstance(v, float) else v for v in override.sweep_iterator()]  # 0.1 + 0.2 is 0.3
    return Axis(
        override.key_or_group, tuple((f"{override.get_key_element()}={_written(v)}", _plain(v)) for v in values)
    )


def recipe_axes(draft: Draft, words: Sequence[str], loader: ConfigLoader) -> tuple[list[Axis], list[Problem]]:
    """The axes of a recipe's sweep.over, but for keys that the command line sets."""
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    axes, problems = list[Axis](), list[Problem]()
    for key, values in axes_of(draft).items():
        who = origin_of(OVER, draft.sweep_origins)
        if key in typed and key != GROUP:
            continue
        found, text = values_in(key, values, loader)
        if text:
            problems.append(Problem(f"{OVER}.{key}", text, who))
        axes += [Axis(key, found)] if found else []
    if isinstance(draft.sweep.get("over", {}), Mapping):
        return axes, problems
    return axes, [Problem(OVER, "expected a section: key → list of values", origin_of(OVER, draft.sweep_origins))]


def values_in(key: str, values: Any, loader: ConfigLoader) -> tuple[tuple[tuple[str, str], ...], str]:
    """The values of an axis of a recipe's, or what is wrong with them."""
    if key == GROUP:
        return (), "a recipe cannot vary the recipe; type +recipe=a,b"
    if isinstance(values, list) and values and "${" not in json.dumps(values, default=str):
        quoted = map(_quoted, values)
        return tuple((f"{key}={_written(value)}", _plain(value)) for value in quoted), ""
    if isinstance(values, str) and "${" not in values:
        axes, _, problems = axes_in([f"{key}={values}"], loader)
        if axes or problems:
            return (axes[0].values if axes else ()), (problems[0].message if problems else "")
    return (), f"expected a list of values, or a text such as range(1,4), got {values!r}"


def _written(value: Any) -> str:
    """A value in the grammar of the command line."""
    return str(Transformer.str(value))


def _plain(value: Any) -> str:
    """A value as it is shown: a text without quotes and escapes."""
    if isinstance(value, QuotedString):
        return value.text
    return value if isinstance(value, str) else _written(value)


def _quoted(value: Any) -> Any:
    """A value of a file, its texts quoted where the grammar would read them otherwise."""
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, dict):
        return {name: _quoted(item) for name, item in value.items()}
    plain = not isinstance(value, str) or value.replace("_", "a").replace("-", "a").isalnum()
    return value if plain else QuotedString(value, Quote.single)
