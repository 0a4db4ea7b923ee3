"""What Hydra makes of the files: one plain tree, who set each key, and what cannot be put together.

choices ─▶ Hydra's defaults list ─▶ merged, file by file ─▶ Files      (the section `sweep` stands aside)

Hydra's complaints are worded here: what is wrong and in which file; never its advice to type `+`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.cli.overrides import Typed
from runner.cli.sources import GROUP, holders, options
from runner.core.errors import Problem
from runner.spec import suggest
from runner.spec.decode import unknown_name
from runner.spec.origin import leaves
from runner.spec.registry import default_registry


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


JOB = "job"
SWEEP = "sweep"  # the section that is about many jobs, and no part of any
PLAIN_NAME = re.compile(r"[\w./-]+")


@dataclass(slots=True)
class Files:
    """What Hydra made of the files: the config, who set each key, and the lines to tell the user."""

    config: DictConfig
    origins: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sweep: dict[str, Any] = field(default_factory=dict)
    sweep_origins: dict[str, str] = field(default_factory=dict)


class Uncomposable(Exception):
    """Hydra cannot put these files together."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def compose_files(loader: ConfigLoader, choices: Sequence[Typed]) -> Files:
    """The files of these choices, put together. Raises Uncomposable."""
    lines = [line_of(choice) for choice in choices]
    try:
        # Not by `loader.compute_defaults_list`, which reads Hydra's own groups too and keeps nothing that it read.
        assert isinstance(loader, ConfigLoaderImpl)
        repository = CachingConfigRepository(loader.repository)
        found = create_defaults_list(
            repo=repository,
            config_name=JOB,
            overrides_list=OverridesParser.create().parse_overrides(lines),
            prepend_hydra=False,
            skip_missing=False,
        )
        return _merged([entry for entry in found.defaults if entry.config_path], repository)
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError, yaml.YAMLError) as error:
        recipes = [f"{GROUP}/{name}" for choice in choices if choice.key == GROUP for name in choice.names]
        raise Uncomposable(worded(error, loader.get_sources(), recipes)) from error


def _merged(entries: Sequence[ResultDefault], repository: CachingConfigRepository) -> Files:
    """What `hydra.compose` makes of these entries, in one pass that also notes who sets each key (half the time)."""
    files = Files(OmegaConf.create())
    for entry in entries:
        path = str(entry.config_path)
        used, *others = holders(repository.get_sources(), path)
        content = repository.load_config(path).config  # type: ignore[union-attr]  # it was loaded for the defaults
        if not isinstance(content, DictConfig):
            raise ValueError(f"In '{path}': expected the sections of a job, not a list")
        boxed = OmegaConf.create()
        OmegaConf.update(boxed, entry.package, content) if entry.package else boxed.merge_with(content)
        files.config.merge_with(boxed)
        files.origins |= {key: path for key, _ in leaves(OmegaConf.to_container(boxed, resolve=False)) if key}
        files.notes += tuple(
            f"warning: {path}: {other.path} has one too, hidden by that of {used.path}" for other in others
        )
    files.config.pop("hydra", None)
    if SWEEP in files.config:
        section = OmegaConf.to_container(OmegaConf.create({SWEEP: files.config.pop(SWEEP)}), resolve=False)
        files.sweep = section[SWEEP] if isinstance(section, dict) else {}
        files.sweep_origins = {k: who for k, who in files.origins.items() if is_sweep(k)}
        files.origins = {k: who for k, who in files.origins.items() if not is_sweep(k)}
    return files


def is_sweep(key: str) -> bool:
    return key == SWEEP or key.startswith(f"{SWEEP}.")


def line_of(choice: Typed) -> str:
    """A choice as Hydra reads it."""
    names = [n if PLAIN_NAME.fullmatch(n) else "'" + n.replace("'", "\\'") + "'" for n in choice.names]
    return f"+{GROUP}=[{','.join(names)}]" if choice.key == GROUP else f"{choice.key}={names[0]}"


def misplaced(files: Files, groups: Sequence[str]) -> list[Problem]:
    """Components chosen by writing `name`, which leaves the old one's options behind; Hydra's settings."""
    found = []
    for group in groups:
        key = f"{group}.name"
        who = files.origins.get(key, "")
        if who and not who.startswith(f"{group}/"):
            chosen = OmegaConf.select(files.config, key)
            found.append(Problem(key, f"a file chooses with 'override /{group}: {chosen}' in its defaults list", who))
        elif not who and (section := files.config.get(group)) and isinstance(section, DictConfig):
            origin = next((o for k, o in files.origins.items() if k.startswith(f"{group}.")), "")
            begin = f"defaults: [{_fitting(section, group)}, _self_]"
            text = f"the file names no component; begin it with a line such as '{begin}'"
            found.append(Problem(group, text, origin))
    for key, who in files.origins.items():
        if key.startswith("hydra.") and who != JOB:
            found.append(Problem(key, "Hydra's own settings are not used", who))
    return found


def _fitting(section: DictConfig, group: str) -> str:
    """The component that has most of a section's options."""
    classes = default_registry().classes(group)
    return max(classes, key=lambda name: len(set(map(str, section)) & set(classes[name].model_fields)))
