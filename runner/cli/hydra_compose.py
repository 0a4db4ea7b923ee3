"""Composition of config files with Hydra: one plain tree, who set each key, and what does not compose.

choices ─▶ Hydra's defaults list ─▶ merged, file by file ─▶ ComposedFiles      (the section `sweep` is separate)

Hydra's errors are reworded here: what is wrong and in which file, without its advice to type `+`.
"""

from __future__ import annotations

import filecmp
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.cli.config_sources import (
    GROUP,
    JOB,
    NEXT,
    SHIPPED,
    SWEEPER,
    RecipesSource,
    defaults_of,
    file_of,
    folders_named,
    label,
    owner_of,
    search_order,
    sources_with,
)
from runner.cli.overrides import TypedOverride, instead_of_hydras
from runner.core.errors import Problem
from runner.spec import suggest
from runner.spec.base import iter_leaves
from runner.spec.registry import default_registry
from runner.spec.schema import CALLBACKS, EVALUATION


def composition_problem(error: Exception, sources: Sequence[ConfigSource], chosen: Sequence[str]) -> Problem:
    """Why files cannot be composed. `chosen` are the config paths of those chosen, recipes first."""
    recipes = [path for path in chosen if path.startswith(f"{GROUP}/")]
    if isinstance(error, RecursionError):
        return _in_a_circle(sources, chosen)
    if isinstance(error, yaml.MarkedYAMLError):
        return Problem("", f"broken YAML: {error.problem} {str(error.problem_mark).strip()}")
    text = str(error)
    prefix = re.match(r"In '([^']+)': ", text)
    origin = label(prefix.group(1), sources) if prefix else ""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        return _missing(group, name, prefix.group(1) if prefix else "", sources, recipes)
    if unresolved := re.search(r"resolving interpolation '([^']+)'", text):
        text = f"{unresolved.group(1)} in a defaults list: only the choice of another group is allowed there"
        who = origin or ", ".join(label(recipe, sources) for recipe in recipes)
        return Problem("", f"{text}, e.g. ${{model}}; type the name itself", who)
    if several := re.search(r"Multiple values for ([^\s.]+)", text):
        who = origin or ", ".join(label(recipe, sources) for recipe in recipes)
        return _without_override(several.group(1), "NAME", who)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        if unknown.group(1).startswith(f"{GROUP}/"):  # `override device: npu`, without the slash
            return _without_override(_within(unknown.group(1).partition("@")[0], prefix), "NAME", origin)
        groups = sorted({group for source in sources for group in source.list("", None) if source.is_group(group)})
        hint = suggest.did_you_mean(unknown.group(1), [g for g in groups if g != "hydra"])
        return Problem(unknown.group(1), f"no such group{hint}", origin)
    lines = [line.strip() for line in text.splitlines() if line.strip() and "To append" not in line]
    return Problem("", " ".join(lines).removeprefix(prefix.group() if prefix else ""), origin)


def _within(group: str, prefix: re.Match[str] | None) -> str:
    """The group that a recipe named, which Hydra takes for one beside the recipe."""
    beside = prefix.group(1).rpartition("/")[0] if prefix else GROUP
    return group.removeprefix(f"{beside}/").removeprefix(f"{GROUP}/")


def _missing(group: str, name: str, who: str, sources: Sequence[ConfigSource], recipes: Sequence[str]) -> Problem:
    origin, beside = label(who, sources), who.rpartition("/")[0]
    if group.startswith(f"{beside}/") and beside.startswith(GROUP):  # `device: npu` in a recipe, without the slash
        return _without_override(group.removeprefix(f"{beside}/"), name, origin)
    found = (_chooser(recipe, group, name, sources) for recipe in recipes)
    chooser = next((who for who in found if who), None)
    text = suggest.unknown_name(group, name, group_options(sources, group))
    return Problem(group, text, label(chooser, sources) if chooser else origin)


def _without_override(group: str, name: str, origin: str) -> Problem:
    return Problem(group, f"a recipe selects with 'override /{group}: {name}', at the end of its defaults list", origin)


def _chooser(recipe: str, group: str, name: str, sources: Sequence[ConfigSource]) -> str | None:
    """The recipe, `recipe` or one that it extends, whose defaults list chooses `group: name`."""
    for target, key in _defaults(recipe, sources):
        if key and key.split(" ")[-1].lstrip("/") == group and target == f"{group}/{name}":
            return recipe
        if not key and (found := _chooser(target, group, name, sources)):
            return found
    return None


def _in_a_circle(sources: Sequence[ConfigSource], chosen: Sequence[str]) -> Problem:
    """The files that extend one another for ever."""
    circle = next((found for path in (*chosen, JOB) if (found := _circle(path, (), sources))), ())
    if not circle:
        return Problem("", "config files extend each other in a cycle", ", ".join(chosen))
    names = [label(path, sources) for path in circle]
    said = " ─▶ ".join([*names, names[0]])
    return Problem(circle[0].partition("/")[0], f"config files extend each other in a cycle: {said}", names[0])


def _circle(path: str, above: tuple[str, ...], sources: Sequence[ConfigSource]) -> tuple[str, ...]:
    """The config paths of a circle that `path` leads into; empty if there is none."""
    if path in above:
        return above[above.index(path) :]
    below = (target for target, _ in _defaults(path, sources))
    return next((found for target in below if (found := _circle(target, (*above, path), sources))), ())


def _defaults(path: str, sources: Sequence[ConfigSource]) -> Iterator[tuple[str, str]]:
    """(config path, key) of what a config's defaults list names; the key of what it extends is empty."""
    held = sources_with(sources, path)
    group = path.rpartition("/")[0]
    for entry in defaults_of(held[0].load_config(path).config) if held else ():
        for key, value in entry.items() if isinstance(entry, DictConfig) else [("", entry)]:
            inner = str(key).split(" ")[-1].partition("@")[0]
            target = f"{inner}/{value}" if inner else str(value).partition("@")[0]
            if target != "_self_":
                target = target[1:] if target.startswith("/") else f"{group}/{target}".lstrip("/")
                yield posixpath.normpath(target), str(key)


SWEEP = "sweep"  # the section that is about many jobs, and no part of any
STORE = "schema"  # who provides the components without a file
PLAIN_NAME = re.compile(r"[\w./-]+")


@dataclass(slots=True)
class ComposedFiles:
    """What Hydra made of the files: the config, who set each key, and the lines to tell the user."""

    config: DictConfig
    origins: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    entries: tuple[ResultDefault, ...] = ()  # Hydra's defaults list, the first merged first
    sweep: dict[str, Any] = field(default_factory=dict)
    sweep_origins: dict[str, str] = field(default_factory=dict)


class Uncomposable(Exception):
    """Hydra cannot put these files together."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def compose_files(repository: CachingConfigRepository, choices: Sequence[TypedOverride]) -> ComposedFiles:
    """The files of these choices, put together. Raises Uncomposable."""
    # Hydra's own sweeper, for `override /hydra/sweeper` in a recipe
    lines = [f"+{SWEEPER}=basic", *(line_of(choice) for choice in choices if "@" not in choice.key)]
    try:
        # Not by Hydra's `compute_defaults_list`, which reads Hydra's own groups too and keeps nothing that it read.
        found = _defaults_list(repository, lines)
        if second := [choice for choice in choices if "@" in choice.key]:
            there = found.overrides.known_choices  # Hydra needs a + before what no file has chosen
            lines += [("" if choice.key in there else "+") + line_of(choice) for choice in second]
            found = _defaults_list(repository, lines)
        return _merge_entries(
            [e for e in found.defaults if e.config_path not in (None, f"{SWEEPER}/basic")], repository
        )
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError, yaml.YAMLError) as error:
        chosen = [f"{choice.key.partition('@')[0]}/{name}" for choice in choices for name in choice.names]
        raise Uncomposable(composition_problem(error, repository.get_sources(), chosen)) from error


def _defaults_list(repository: CachingConfigRepository, lines: list[str]) -> DefaultsList:
    return create_defaults_list(
        repo=repository,
        config_name=JOB,
        overrides_list=OverridesParser.create().parse_overrides(lines),
        prepend_hydra=False,
        skip_missing=False,
    )


def _merge_entries(entries: Sequence[ResultDefault], repository: CachingConfigRepository) -> ComposedFiles:
    """What `hydra.compose` makes of these entries, in one pass that also notes who sets each key.

    One pass takes half the time of two.
    """
    files, sources = ComposedFiles(OmegaConf.create(), entries=tuple(entries)), repository.get_sources()
    for entry in entries:
        path = str(entry.config_path)
        who = label(path, sources)
        content = repository.load_config(path).config  # type: ignore[union-attr]  # it was loaded for the defaults
        if not isinstance(content, DictConfig):
            raise ValueError(f"In '{path}': expected the sections of a job, not a list")
        boxed = OmegaConf.create()
        OmegaConf.update(boxed, entry.package, content) if entry.package else boxed.merge_with(content)
        files.config.merge_with(boxed)
        new = {key: who for key, _ in iter_leaves(OmegaConf.to_container(boxed, resolve=False)) if key}
        outer = {key[:dot] for key in new for dot in range(len(key)) if key[dot] == "."}  # values that became sections
        files.origins = {key: by for key, by in files.origins.items() if key not in outer} | new
    files.notes = override_notes([str(entry.config_path) for entry in entries], sources)
    files.config.pop("hydra", None)
    if SWEEP in files.config:
        section = OmegaConf.to_container(OmegaConf.create({SWEEP: files.config.pop(SWEEP)}), resolve=False)
        files.sweep = section[SWEEP] if isinstance(section, dict) else {}
        files.sweep_origins = {k: who for k, who in files.origins.items() if is_sweep(k)}
        files.origins = {k: who for k, who in files.origins.items() if not is_sweep(k)}
    return files


def override_notes(paths: Sequence[str], sources: Sequence[ConfigSource]) -> tuple[str, ...]:
    """A line for each file that overrides or extends others of its name."""
    lines = []
    for path in dict.fromkeys(path.rstrip(NEXT) for path in paths):
        lines += [f"{folder} is a folder, not a file: not used" for folder in folders_named(path, sources)]
        first, *others = sources_with(sources, path)
        others = [source for source in others if source.provider != STORE]
        extended = sum(f"{path}{NEXT * depth}" in paths for depth in range(1, len(others) + 1))
        others = [source for source in others if extended or not _are_equal(first, source, path)]
        files = [owner_of(source, path) for source in (first, *others)]
        for place, verb in enumerate([*["extends"] * extended, "overrides"][: len(others)]):
            below = files[place + 1 : place + 2] if verb == "extends" else files[place + 1 :]
            whose = " and ".join(f"the shipped {path}" if owner == SHIPPED else owner for owner in below)
            upper = f"the shipped {path}" if files[place] == SHIPPED else files[place]
            lines.append(f"{upper} {verb} {whose}")
    return tuple(lines)


def _are_equal(one: ConfigSource, other: ConfigSource, path: str) -> bool:
    """Whether two files of a name are equal; the other one is never read as a config, whatever is in it."""
    first, second = file_of(one, path), file_of(other, path)
    return os.path.isfile(first) and os.path.isfile(second) and filecmp.cmp(first, second, shallow=False)


def is_sweep(key: str) -> bool:
    return key == SWEEP or key.startswith(f"{SWEEP}.")


def line_of(choice: TypedOverride) -> str:
    """A choice as Hydra reads it."""
    names = [n if PLAIN_NAME.fullmatch(n) else "'" + n.replace("'", "\\'") + "'" for n in choice.names]
    several = f"[{','.join(names)}]"
    if choice.key == GROUP:
        return f"+{GROUP}={several}"
    return f"{choice.key}={several if choice.key in (CALLBACKS, EVALUATION) else names[0]}"


def misplaced_choices(files: ComposedFiles, groups: Sequence[str]) -> list[Problem]:
    """Components chosen by writing `name`, which leaves the old one's options behind; Hydra's settings."""
    found = []
    for group in groups:
        key = f"{group}.name"
        who = files.origins.get(key, "")
        if who and not who.startswith(f"{group}/"):
            chosen = OmegaConf.select(files.config, key)
            found.append(Problem(key, f"a file selects with 'override /{group}: {chosen}' in its defaults list", who))
        elif not who and (section := files.config.get(group)) and isinstance(section, DictConfig):
            origin = next((o for k, o in files.origins.items() if k.startswith(f"{group}.")), "")
            begin = f"defaults: [{_best_component(section, group)}, _self_]"
            text = f"the file selects no component; start it with a line such as '{begin}'"
            found.append(Problem(group, text, origin))
    job = f"{JOB} ({SHIPPED})" if f"{JOB} ({SHIPPED})" in files.origins.values() else JOB
    for key, who in files.origins.items():
        if key.startswith("hydra.") and who != job:
            found.append(Problem(key, instead_of_hydras(key), who))
    return found


def _best_component(section: DictConfig, group: str) -> str:
    """The component that has most of a section's options."""
    classes = default_registry().classes(group)
    return max(classes, key=lambda name: len(set(map(str, section)) & set(classes[name].model_fields)))


def group_options(sources: Sequence[ConfigSource], group: str) -> list[str]:
    """What can be chosen for `group`, folders within it included, in alphabetical order."""
    found: set[str] = set()
    for source in sources:
        if source.is_group(group):
            found.update(source.list(group, ObjectType.CONFIG))
            for folder in source.list(group, ObjectType.GROUP):
                found.update(f"{folder}/{name}" for name in group_options([source], f"{group}/{folder}"))
    return sorted(found)


def known_recipes(config_dir: Path | None) -> list[str]:
    """The recipes that are found with this --config-dir; no session is needed, and one may be open."""
    found = [tuple(url.split("://", 1)) for found in search_order(config_dir) for _, url in found]
    folders = [place if scheme == RecipesSource.scheme() else f"{place}/{GROUP}" for scheme, place in found]
    return group_options([RecipesSource("", f"{RecipesSource.scheme()}://{folder}") for folder in folders], GROUP)
