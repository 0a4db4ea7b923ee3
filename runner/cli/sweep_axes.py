"""The section `sweep` and what it varies, on the command line (Hydra's grammar) or in a recipe.

options   judged like the sections of a job
axes      keys with several values
space     of a search: intervals, ranges and choices
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
    Sweep,
    Transformer,
)
from hydra.errors import HydraException
from pydantic import ValidationError

from runner.checkpoint.config import direction
from runner.cli.config_sources import GROUP
from runner.cli.hydra_compose import SWEEP
from runner.cli.job_builder import JobDraft
from runner.cli.overrides import TypedOverride, problem, with_home
from runner.core.errors import Problem
from runner.spec import suggest
from runner.spec.base import COMMAND_LINE, iter_leaves, origin_of
from runner.spec.migrate import renamed_metric
from runner.spec.schema import model_schema
from runner.spec.suggest import value_complaint
from runner.sweep.config import Better, SweepConfig, as_tuple
from runner.sweep.space import Dimension

OVER = f"{SWEEP}.over"


def axes_of(draft: JobDraft) -> dict[str, Any]:
    """What a recipe varies: dotted key → values, whether the file nests the keys or writes them with dots."""
    over = draft.sweep.get("over", {})
    return dict(iter_leaves(over)) if isinstance(over, Mapping) and over else {}


def decode_sweep_options(
    drafts: Iterable[JobDraft], typed: Iterable[TypedOverride], given: Mapping[str, Any] | None = None
) -> tuple[SweepConfig, list[Problem]]:
    """The options that the recipes and the command line give a sweep, and what is wrong with them.

    given: those that it has already
    """
    values: dict[str, Any] = dict(given or {})
    origins: dict[str, str] = {}
    found: list[Problem] = []
    for draft in drafts:
        for name, value in draft.sweep.items():
            key = f"{SWEEP}.{name}"
            who = origin_of(key, draft.sweep_origins)
            if name != "over" and values.setdefault(name, value) != value:
                text = f"{origins[key]} sets {values[name]}, but {who} sets {value}; set it on the command line"
                found.append(Problem(key, text, who))
            origins.setdefault(key, who)
    for word in typed:
        if word.key == SWEEP or word.key.startswith(OVER):
            text = f"type varied values as KEY=1,2,3, and options of a sweep as {SWEEP}.parallel=2"
            found.append(problem(word.key, text))
            continue
        values[word.key.removeprefix(f"{SWEEP}.")] = word.value
        origins[word.key] = COMMAND_LINE
        found = [p for p in found if p.key != word.key]
    values.pop("over", None)  # the axes of each recipe are judged where they are expanded
    return _validate_options(values, origins, found)


def metric_directions(options: SweepConfig) -> list[tuple[str, Better]]:
    """Each metric of sweep.metric, and whether more or less of it is better."""
    metrics = as_tuple(options.metric)
    modes = as_tuple(options.metric_mode) or [direction(metric) for metric in metrics]
    return list(zip(metrics, modes, strict=True))


def _validate_options(
    values: Mapping[str, Any], origins: Mapping[str, str], found: list[Problem]
) -> tuple[SweepConfig, list[Problem]]:
    try:
        config = SweepConfig.model_validate(values)
    except ValidationError as error:
        names = {str(e["loc"][0]) for e in error.errors(include_url=False, include_input=False)}
        wrong = {f"{SWEEP}.{name}": _wrong_value(name, values[name]) for name in sorted(names)}
        return SweepConfig(), found + [Problem(key, text, origin_of(key, origins)) for key, text in wrong.items()]
    said = config.problems(None)
    renamed = {name: ours for name in as_tuple(config.metric) if (ours := renamed_metric(name)) is not None}
    for name, ours in renamed.items():
        said.append((f"{SWEEP}.metric", f"no metric is named {name}; type {SWEEP}.metric={ours}"))
    judged = () if config.metric_mode or renamed else as_tuple(config.metric)
    if unknown := [name for name in judged if direction(name) is None]:
        text = f"must be set, max or min for each, because sweep.metric has no known direction: {', '.join(unknown)}"
        said.append(("sweep.metric_mode", text))
    return config, found + [Problem(key, text, origin_of(key, origins)) for key, text in said]


def _wrong_value(name: str, value: Any) -> str:
    if name in SweepConfig.model_fields:
        return value_complaint(model_schema(SweepConfig)[name], f"{SWEEP}.{name}", value)
    hint = suggest.did_you_mean(name, SweepConfig.model_fields)
    return f"not an option of a sweep{hint or '; for all options: run help sweep'}"


def sweeps_in(words: Sequence[str], loader: ConfigLoader) -> tuple[list[Override], list[str]]:
    """The words with several values, and the others. Mistakes are reported when a job's words are read."""
    sweeps, fixed = list[Override](), list[str]()
    parser = OverridesParser.create()
    for word in words:
        try:
            override = parser.parse_override(with_home(word))
        except HydraException:
            fixed.append(word)
            continue
        override.config_loader = loader  # a glob reads the names from it
        if override.is_sweep_override():
            sweeps.append(override)
        else:
            fixed.append(word)
    return sweeps, fixed


def axes_in(words: Sequence[str], loader: ConfigLoader) -> tuple[list[Dimension], list[str], list[Problem]]:
    """The words with several values, the others, and what cannot be enumerated."""
    sweeps, fixed = sweeps_in(words, loader)
    axes, problems = list[Dimension](), list[Problem]()
    for override in sweeps:
        if not override.is_discrete_sweep():
            text = "list the values (1e-4,3e-4), or type range(START,STOP,STEP); intervals need sweep.search"
            problems.append(problem(override.key_or_group, text))
        else:
            axis = axis_of(override)
            axes.append(axis)
            problems += [] if axis.values else [problem(axis.key, f"{override.get_value_string()} matches nothing")]
    return axes, fixed, problems


def axis_of(override: Override) -> Dimension:
    """What can be enumerated, as a choice."""
    key, word = override.key_or_group, override.get_key_element()
    values = [float(f"{v:.12g}") if isinstance(v, float) else v for v in override.sweep_iterator()]  # 0.1 + 0.2 is 0.3
    pairs = tuple((f"{word}={_to_override_text(value)}", _display_text(value)) for value in values)
    return Dimension(key, word, "choice", values=pairs)


def recipe_axes(draft: JobDraft, words: Sequence[str], loader: ConfigLoader) -> tuple[list[Dimension], list[Problem]]:
    """The axes of a recipe's sweep.over, but for keys that the command line sets."""
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    axes, problems = list[Dimension](), list[Problem]()
    for key, values in axes_of(draft).items():
        who = origin_of(OVER, draft.sweep_origins)
        if key in typed and key != GROUP:
            continue
        found, text = values_in(key, values, loader)
        if text:
            problems.append(Problem(f"{OVER}.{key}", text, who))
        axes += [Dimension(key, key, "choice", values=found)] if found else []
    if isinstance(draft.sweep.get("over", {}), Mapping):
        return axes, problems
    return axes, [Problem(OVER, "expected a section: key → list of values", origin_of(OVER, draft.sweep_origins))]


def values_in(key: str, values: Any, loader: ConfigLoader) -> tuple[tuple[tuple[str, str], ...], str]:
    """The values of an axis of a recipe's, or what is wrong with them."""
    if key == GROUP:
        return (), "a recipe cannot vary the recipe; type +recipe=a,b"
    if isinstance(values, list) and values and "${" not in json.dumps(values, default=str):
        quoted = map(_quote, values)
        return tuple((f"{key}={_to_override_text(value)}", _display_text(value)) for value in quoted), ""
    if isinstance(values, str) and "${" not in values:
        axes, _, problems = axes_in([f"{key}={values}"], loader)
        if axes or problems:
            return (axes[0].values if axes else ()), (problems[0].message if problems else "")
    return (), f"expected a list of values, or a text such as range(1,4), got {values!r}"


def _to_override_text(value: Any) -> str:
    """A value in the grammar of the command line."""
    return str(Transformer.str(value))


def _display_text(value: Any) -> str:
    """A value as it is shown: a text without quotes and escapes."""
    if isinstance(value, QuotedString):
        return value.text
    return value if isinstance(value, str) else _to_override_text(value)


def _quote(value: Any) -> Any:
    """A value of a file, its texts quoted where the grammar would read them otherwise."""
    if isinstance(value, list):
        return [_quote(item) for item in value]
    if isinstance(value, dict):
        return {name: _quote(item) for name, item in value.items()}
    plain = not isinstance(value, str) or value.replace("_", "a").replace("-", "a").isalnum()
    return value if plain else QuotedString(value, Quote.single)


TAGS = frozenset({"log", "int"})


def space_in(words: Sequence[str], loader: ConfigLoader) -> tuple[list[Dimension], list[str], list[Problem]]:
    """The words with several values as dimensions, the other words, and what is wrong with a dimension."""
    sweeps, fixed = sweeps_in(words, loader)
    space, problems = list[Dimension](), list[Problem]()
    for override in sweeps:
        dimension = _dimension(override)
        text = _dimension_problem(dimension) or _tag_problem(override, dimension)
        space += [] if text else [dimension]
        problems += [problem(dimension.key, text)] if text else []
    return space, fixed, problems


def recipe_space(
    draft: JobDraft, words: Sequence[str], loader: ConfigLoader, given: str
) -> tuple[list[Dimension], list[Problem]]:
    """The dimensions of a recipe's sweep.over, except keys that the command line sets.

    given: the word that chose the recipe, if that is a dimension itself
    """
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
    return axis_of(override)


def _tag_problem(override: Override, dimension: Dimension) -> str:
    """A tag that says nothing here."""
    value = override.value()
    tags = value.tags if isinstance(value, Sweep) else set()
    if unknown := sorted(tags - TAGS):
        return f"tag({unknown[0]},…) is not supported; use {' and '.join(sorted(f'tag({t},…)' for t in TAGS))}"
    return "a tag is for an interval or a range, not for a choice" if tags and dimension.kind == "choice" else ""


def _dimension_problem(dimension: Dimension) -> str:
    if dimension.kind == "choice":
        return "" if dimension.values else "matches nothing"
    if dimension.low > dimension.high:
        return f"an interval from {dimension.low:g} to {dimension.high:g} is empty; type interval(LOW,HIGH)"
    if dimension.log and (dimension.low <= 0 or dimension.step > 1):
        return "tag(log,…) needs an interval above 0, without steps"
    return ""
