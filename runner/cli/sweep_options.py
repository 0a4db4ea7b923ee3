"""The section `sweep`: read from recipes and the command line, and judged like the sections of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from runner.checkpoint.config import direction
from runner.cli.compose import Draft
from runner.cli.files import SWEEP
from runner.cli.overrides import Typed, problem
from runner.errors import Problem
from runner.spec import suggest
from runner.spec.origin import COMMAND_LINE, leaves, origin_of
from runner.spec.schema import model_schema
from runner.spec.words import complaint
from runner.sweep.config import Better, SweepConfig, several

OVER = f"{SWEEP}.over"


def axes_of(draft: Draft) -> dict[str, Any]:
    """What a recipe varies: dotted key → values, whether the file nests the keys or writes them with dots."""
    over = draft.sweep.get("over", {})
    return dict(leaves(over)) if isinstance(over, Mapping) and over else {}


def decode(
    drafts: Iterable[Draft], typed: Iterable[Typed], given: Mapping[str, Any] | None = None
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
                text = f"{origins[key]} says {values[name]}, {who} says {value}; say it on the command line"
                found.append(Problem(key, text, who))
            origins.setdefault(key, who)
    for word in typed:
        if word.key == SWEEP or word.key.startswith(OVER):
            text = f"what varies is typed as KEY=1,2,3; an option of a sweep as {SWEEP}.parallel=2"
            found.append(problem(word.key, text))
            continue
        values[word.key.removeprefix(f"{SWEEP}.")] = word.value
        origins[word.key] = COMMAND_LINE
        found = [p for p in found if p.key != word.key]
    values.pop("over", None)  # the axes of each recipe are judged where they are expanded
    return _judged(values, origins, found)


def better(options: SweepConfig) -> list[tuple[str, Better]]:
    """Each metric of sweep.metric, and whether more or less of it is better."""
    metrics = several(options.metric)
    modes = several(options.metric_mode) or [direction(metric) for metric in metrics]
    return list(zip(metrics, modes, strict=True))


def _judged(
    values: Mapping[str, Any], origins: Mapping[str, str], found: list[Problem]
) -> tuple[SweepConfig, list[Problem]]:
    try:
        config = SweepConfig.model_validate(values)
    except ValidationError as error:
        names = {str(e["loc"][0]) for e in error.errors(include_url=False, include_input=False)}
        found += [
            Problem(f"{SWEEP}.{n}", _wrong(n, values[n]), origin_of(f"{SWEEP}.{n}", origins)) for n in sorted(names)
        ]
        return SweepConfig(), found
    said = config.problems(None)
    unknown = [] if config.metric_mode else [name for name in several(config.metric) if direction(name) is None]
    if unknown:
        text = f"must be given, max or min for each: nothing is known of sweep.metric={', '.join(unknown)}"
        said.append(("sweep.metric_mode", text))
    return config, found + [Problem(key, text, origin_of(key, origins)) for key, text in said]


def _wrong(name: str, value: Any) -> str:
    if name in SweepConfig.model_fields:
        return complaint(model_schema(SweepConfig)[name], f"{SWEEP}.{name}", value)
    meant = suggest.nearest(name, SweepConfig.model_fields)
    return "not an option of a sweep" + (f"; did you mean '{meant}'?" if meant else "")
