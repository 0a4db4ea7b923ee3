"""From a command line, or a run's spec.yaml, to a decoded job and who set each value.

words ─▶ read ─▶ choices ─▶ Hydra ─▶ values on top ─▶ interpolations ─▶ decode ─▶ Composed
                   └────────── everything wrong on the way is reported at once ─────┘
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.cli.mishaps import worded
from runner.cli.overrides import Typed, apply, check, problem, read, with_demo
from runner.cli.resolve import escaped, resolve
from runner.cli.sources import GROUP, holders, options, session
from runner.errors import EnvironmentProblem, Problem, SpecError
from runner.registry import Registry, default_registry
from runner.spec.decode import decode
from runner.spec.job import JobSpec
from runner.spec.origin import COMMAND_LINE, leaves
from runner.spec.schema import groups_of

JOB = "job"
SPEC = "spec.yaml"
PLAIN_NAME = re.compile(r"[\w./-]+")


@dataclass(frozen=True, slots=True)
class Composed:
    """A job: decoded, as plain data with every default, who set each key, and what was typed."""

    spec: JobSpec
    data: dict[str, Any]
    origins: dict[str, str]
    overrides: list[str]
    notes: tuple[str, ...] = ()  # one line per choice that was made for the user


@dataclass(frozen=True, slots=True)
class Draft:
    """A job before it is decoded, and what is wrong with it so far."""

    data: dict[str, Any]
    origins: dict[str, str]
    overrides: list[str]
    problems: list[Problem]
    unsure: frozenset[str] = frozenset()  # groups whose choice was a mistake: what else is said of them may be wrong
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Files:
    """What Hydra made of the files: the config, who set each key, and the lines to tell the user."""

    config: DictConfig
    origins: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def compose_job(words: Sequence[str], config_dir: Path | None = None) -> Composed:
    """The job that a command line describes. Raises SpecError with every problem, SecurityRefusal."""
    return finish(draft(words, config_dir), default_registry())


def re_decode(spec_yaml: Path, overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """The job in a run's spec.yaml with overrides on top. Raises SpecError, SecurityRefusal, EnvironmentProblem."""
    registry = default_registry()
    typed, problems = read(overrides, groups_of(registry))
    config = _load_spec(spec_yaml)
    origins = {key: SPEC for key, _ in leaves(OmegaConf.to_container(config))}
    choices = [t for t in typed if t.choice]
    if any(t.key == GROUP for t in choices):
        problems.append(Problem(GROUP, "a spec is a whole job already; it takes single overrides", COMMAND_LINE))
        choices = [t for t in choices if t.key != GROUP]
    if choices or config_dir:
        problems += _sections(choices, registry, config, origins, config_dir)
    return finish(_overlaid(_Files(config, origins), typed, problems), registry)


def draft(words: Sequence[str], config_dir: Path | None = None) -> Draft:
    """Compose files and command line without judging the result. Raises SpecError where Hydra cannot go on."""
    registry = default_registry()
    groups = groups_of(registry)
    typed, problems = read(words, groups)
    typed, notes = with_demo(typed)
    with session(registry, config_dir) as loader:
        choices, wrong, unsure = _checked([t for t in typed if t.choice], loader.get_sources(), groups)
        problems += wrong
        files = _compose(loader, choices, problems)
    misplaced = _misplaced(files, groups)
    unsure |= {p.key.removesuffix(".name") for p in misplaced}
    result = _overlaid(files, typed, problems + misplaced)
    return Draft(result.data, result.origins, result.overrides, result.problems, unsure, notes + files.notes)


def finish(drafted: Draft, registry: Registry) -> Composed:
    """Decode a draft. Raises SpecError with the draft's problems and the decoder's."""
    problems = list(drafted.problems)
    spec = None
    try:
        spec = decode(drafted.data, drafted.origins, registry)
    except SpecError as error:
        said = {p.key for p in problems}
        problems += [p for p in error.problems if p.key not in said and not _doubtful(p, drafted.unsure, registry)]
    if problems or spec is None:
        raise SpecError(problems)
    return Composed(spec, spec.model_dump(mode="json"), drafted.origins, drafted.overrides, drafted.notes)


def _doubtful(problem: Problem, unsure: frozenset[str], registry: Registry) -> bool:
    """Whether a problem may only come from the component that was taken in place of an unknown one."""
    group, _, key = problem.key.partition(".")
    return group in unsure and (not key or any(key in cls.model_fields for cls in registry.classes(group).values()))


def _checked(
    choices: Iterable[Typed], sources: Sequence[ConfigSource], groups: Sequence[str]
) -> tuple[list[Typed], list[Problem], frozenset[str]]:
    """The choices that can be composed, what is wrong with the others, and the groups that are in doubt by that."""
    kept, problems = [], []
    unsure: set[str] = set()
    for choice in choices:
        good, wrong = check(choice, options(sources, choice.key))
        problems += wrong
        if wrong:
            unsure.update(groups if choice.key == GROUP else [choice.key])
        if good:
            kept.append(good)
    return kept, problems, frozenset(unsure)


def _compose(loader: ConfigLoader, choices: Sequence[Typed], problems: Sequence[Problem]) -> _Files:
    lines = [_line(choice) for choice in choices]
    sources = loader.get_sources()
    try:
        entries = loader.compute_defaults_list(JOB, lines, RunMode.RUN).defaults
        return _merged([e for e in entries if e.config_path and not e.config_path.startswith("hydra/")], sources)
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError, yaml.YAMLError) as error:
        recipes = [f"{GROUP}/{name}" for choice in choices if choice.key == GROUP for name in choice.names]
        raise SpecError([*problems, worded(error, sources, recipes)]) from error


def _merged(entries: Sequence[ResultDefault], sources: Sequence[ConfigSource]) -> _Files:
    """What `hydra.compose` makes of these entries, in one pass that also notes who sets each key (half the time)."""
    files = _Files(OmegaConf.create())
    for entry in entries:
        path = str(entry.config_path)
        used, *others = holders(sources, path)
        content = used.load_config(path).config
        if not isinstance(content, DictConfig):
            raise ValueError(f"In '{path}': expected the sections of a job, not a list")
        content.pop("defaults", None)
        boxed = OmegaConf.create()
        OmegaConf.update(boxed, entry.package, content) if entry.package else boxed.merge_with(content)
        files.config.merge_with(boxed)
        files.origins |= {key: path for key, _ in leaves(OmegaConf.to_container(boxed, resolve=False)) if key}
        files.notes += tuple(
            f"warning: {path}: {other.path} has one too, hidden by that of {used.path}" for other in others
        )
    files.config.pop("hydra", None)
    return files


def _line(choice: Typed) -> str:
    names = [n if PLAIN_NAME.fullmatch(n) else "'" + n.replace("'", "\\'") + "'" for n in choice.names]
    return f"+{GROUP}=[{','.join(names)}]" if choice.key == GROUP else f"{choice.key}={names[0]}"


def _misplaced(files: _Files, groups: Sequence[str]) -> list[Problem]:
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


def _overlaid(files: _Files, typed: Sequence[Typed], problems: Sequence[Problem]) -> Draft:
    """The command line's values on top of the files', all interpolations resolved."""
    named = {key: name for t in typed if not t.choice for key, name in leaves(t.value, t.key) if _is_choice(key)}
    wrong = [
        problem(key, f"a component is chosen with {key.removesuffix('.name')}={name}") for key, name in named.items()
    ]
    values = [t for t in typed if not t.choice and not any(f"{key}.".startswith(f"{t.key}.") for key in named)]
    found = [*problems, *wrong, *apply(files.config, values)]
    of_files = {key: who for key, who in files.origins.items() if not key.startswith("hydra.")}
    origins = of_files | {key: COMMAND_LINE for t in values for key in _touched(t, of_files)}
    data, broken = resolve(files.config, origins)
    return Draft(data, origins, [t.line for t in typed], found + broken)


def _touched(typed: Typed, origins: Mapping[str, str]) -> set[str]:
    """The keys that a value sets, and the single value that it makes a section of, if there is one."""
    parts = typed.key.split(".")
    above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return {key for key, _ in leaves(typed.value, typed.key)} | (above & origins.keys())


def _is_choice(key: str) -> bool:
    group, _, leaf = key.partition(".")
    return leaf == "name" and group in groups_of(default_registry())


def _sections(
    choices: Sequence[Typed], registry: Registry, config: DictConfig, origins: dict[str, str], config_dir: Path | None
) -> list[Problem]:
    """Put newly chosen components in place of a spec's."""
    with session(registry, config_dir) as loader:
        kept, problems, _ = _checked(choices, loader.get_sources(), groups_of(registry))
        files = _compose(loader, kept, problems)
    for choice in kept:
        for key in [k for k in origins if k.startswith(f"{choice.key}.")]:
            del origins[key]
        config[choice.key] = files.config[choice.key]
        origins |= {k: who for k, who in files.origins.items() if k.startswith(f"{choice.key}.")}
    return problems


def _load_spec(path: Path) -> DictConfig:
    if not path.is_file():
        raise EnvironmentProblem(f"{path}: no such file; the spec.yaml of a run is expected")
    try:
        config = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError([worded(error, (), ())]) from error
    content = OmegaConf.to_container(config)
    if not isinstance(content, dict):
        raise SpecError([Problem("", f"{path}: expected the sections of a job")])
    spec: DictConfig = OmegaConf.create(escaped(content))
    return spec
