"""Hydra's complaints about files, in our words: what is wrong and in which file; never its advice to type `+`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import MissingConfigException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, ListConfig

from runner.cli.sources import GROUP, holders, options
from runner.errors import Problem
from runner.spec import suggest
from runner.spec.decode import unknown_name


def worded(error: Exception, sources: Sequence[ConfigSource], recipes: Sequence[str]) -> Problem:
    """Why files cannot be composed. `recipes` are the config paths of those chosen."""
    if isinstance(error, RecursionError):
        return Problem(GROUP, "recipes extend one another in a circle", ", ".join(recipes))
    text = str(error)
    prefix = re.match(r"In '([^']+)': ", text)
    origin = prefix.group(1) if prefix else ""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        return _missing(group, name, origin, sources, recipes)
    if several := re.search(r"Multiple values for ([^\s.]+)", text):
        return _without_override(several.group(1), "NAME", origin or ", ".join(recipes))
    if unknown := re.search(r"Could not override '([^']+)'", text):
        if unknown.group(1).startswith(f"{GROUP}/"):  # `override device: npu`, without the slash
            return _without_override(unknown.group(1).removeprefix(f"{GROUP}/").partition("@")[0], "NAME", origin)
        groups = sorted({group for source in sources for group in source.list("", None) if source.is_group(group)})
        meant = suggest.nearest(unknown.group(1), [g for g in groups if g != "hydra"])
        return Problem(unknown.group(1), "no such group" + (f"; did you mean '{meant}'?" if meant else ""), origin)
    lines = [line.strip() for line in text.splitlines() if line.strip() and "To append" not in line]
    return Problem("", " ".join(lines).removeprefix(prefix.group() if prefix else ""), origin)


def _missing(group: str, name: str, origin: str, sources: Sequence[ConfigSource], recipes: Sequence[str]) -> Problem:
    if group.startswith(f"{GROUP}/"):  # `device: npu` in a recipe, which Hydra takes for a group within `recipe`
        return _without_override(group.removeprefix(f"{GROUP}/"), name, origin)
    found = (_chooser(recipe, group, name, sources) for recipe in recipes)
    chooser = next((who for who in found if who), origin)
    return Problem(group, unknown_name(group, name, options(sources, group)), chooser)


def _without_override(group: str, name: str, origin: str) -> Problem:
    return Problem(group, f"a recipe chooses with 'override /{group}: {name}', at the end of its defaults list", origin)


def _chooser(recipe: str, group: str, name: str, sources: Sequence[ConfigSource]) -> str | None:
    """The recipe, `recipe` or one that it extends, whose defaults list chooses `group: name`."""
    held = holders(sources, recipe)
    config = held[0].load_config(recipe).config if held else None
    defaults = config.get("defaults") if isinstance(config, DictConfig) else None
    for entry in defaults if isinstance(defaults, ListConfig) else ():
        if isinstance(entry, DictConfig):
            if any(str(key).split(" ")[-1].lstrip("/") == group and value == name for key, value in entry.items()):
                return recipe
        elif entry != "_self_" and (found := _chooser(f"{recipe.rpartition('/')[0]}/{entry}", group, name, sources)):
            return found
    return None
