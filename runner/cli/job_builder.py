"""From a command line, or a run's spec.yaml, to a decoded job and who set each value.

words ─▶ read ─▶ choices ─▶ Hydra ─▶ values on top ─▶ interpolations ─▶ decode ─▶ ComposedJob
                   └────────── everything wrong on the way is reported at once ─────┘
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from omegaconf import DictConfig, OmegaConf

from runner.cli.config_sources import GROUP, SWEEPER, hydra_session, is_file_name, recipe_file_problem
from runner.cli.hydra_compose import (
    SWEEP,
    ComposedFiles,
    Uncomposable,
    compose_files,
    composition_problem,
    group_options,
    is_sweep,
    known_recipes,
    line_of,
    misplaced_choices,
)
from runner.cli.overrides import (
    SWEEP_ALONE,
    TypedOverride,
    apply_values,
    check_choice,
    escape_interpolations,
    problem,
    read_overrides,
    resolve_interpolations,
    with_demo,
)
from runner.cli.user_yaml import load_yaml
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.spec.base import COMMAND_LINE, iter_leaves, origin_of
from runner.spec.decode import decode, with_origins
from runner.spec.job import CONFIG_DIR, RECIPE, JobSpec
from runner.spec.registry import Registry, default_registry
from runner.spec.saved_spec import translate_spec
from runner.spec.schema import EVALUATION, groups_of, with_second_models
from runner.spec.suggest import unknown_name


def unknown_recipes(spec: JobSpec, origins: Mapping[str, str]) -> list[Problem]:
    """A problem for each option that names a recipe that does not exist."""
    models = {f"algorithm.{option}": path for option, path in spec.algorithm.upstream_models().items()}
    wrong = {}
    for key, path in {"init_from": spec.init_from or "", **models}.items():
        name, _, config_dir = path.removeprefix(RECIPE).partition(CONFIG_DIR)
        if not path.startswith(RECIPE):
            continue
        if is_file_name(name):
            wrong[key] = recipe_file_problem(name)
        elif name not in (known := known_recipes(Path(config_dir) if config_dir else None)):
            wrong[key] = unknown_name(GROUP, name, known)
    return [Problem(key, message, origin_of(key, origins)) for key, message in wrong.items() if message]


def _add_config_dir(spec: JobSpec, config_dir: Path | None) -> JobSpec:
    """Add the folder of --config-dir to the recipes of a spec that run first."""
    if config_dir is None:
        return spec

    def own(path: str) -> str:
        is_bare = path.startswith(RECIPE) and CONFIG_DIR not in path
        return f"{path}{CONFIG_DIR}{config_dir.absolute()}" if is_bare else path

    models = {option: own(path) for option, path in spec.algorithm.upstream_models().items()}
    algorithm = spec.algorithm.model_copy(update=models)
    return spec.model_copy(update={"algorithm": algorithm, "init_from": spec.init_from and own(spec.init_from)})


SPEC = "spec.yaml"


@dataclass(frozen=True, slots=True)
class ComposedJob:
    """A job: decoded, as plain data with every default, who set each key, and what was typed."""

    spec: JobSpec
    data: dict[str, Any]
    origins: dict[str, str]
    overrides: list[str]
    notes: tuple[str, ...] = ()  # one line per choice that was made for the user


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job before it is decoded, and what is wrong with it so far."""

    data: dict[str, Any]
    origins: dict[str, str]
    overrides: list[str]
    problems: list[Problem]
    unsure: frozenset[str] = frozenset()  # groups whose choice was a mistake: what else is said of them may be wrong
    notes: tuple[str, ...] = ()
    config_dir: Path | None = None
    entries: tuple[ResultDefault, ...] = ()  # Hydra's defaults list, the first merged first
    sweep: Mapping[str, Any] = field(default_factory=dict)  # what the files say of a sweep, with who said it
    sweep_origins: Mapping[str, str] = field(default_factory=dict)


ExtraWords = Callable[[JobDraft], Sequence[str]]  # further words, which follow from what was drafted


def no_extra_words(drafted: JobDraft) -> Sequence[str]:
    """What is typed is all."""
    return ()


def compose_job(words: Sequence[str], config_dir: Path | None = None, more: ExtraWords = no_extra_words) -> ComposedJob:
    """The job that a command line describes. Raises SpecError with every problem, SecurityError.

    Also raises what `more` raises.
    """
    drafted = draft(words, config_dir)
    if others := more(drafted):
        drafted = draft([*words, *others], config_dir)
    said_by = drafted.sweep_origins.values()
    unused = dict.fromkeys([who for who in said_by if not who.startswith(SWEEPER)] or said_by)
    said = tuple(f"{who}: its section {SWEEP} is for run -m; this is one run" for who in unused)
    drafted = replace(drafted, notes=drafted.notes + said)
    return decode_draft(drafted, default_registry())


def re_decode(
    spec_yaml: Path, overrides: Sequence[str], config_dir: Path | None = None, more: ExtraWords = no_extra_words
) -> ComposedJob:
    """The job in a run's spec.yaml with overrides. Raises SpecError, SecurityError, EnvironmentProblem.

    Also raises what `more` raises.
    """
    drafted = re_draft(spec_yaml, overrides, config_dir)
    if others := more(drafted):
        drafted = re_draft(spec_yaml, [*overrides, *others], config_dir)
    return decode_draft(drafted, default_registry())


def spec_file(path: Path) -> Path:
    """The spec.yaml of a run's folder; any other path is one itself."""
    return path / SPEC if path.is_dir() else path


def re_draft(spec_yaml: Path, overrides: Sequence[str], config_dir: Path | None = None) -> JobDraft:
    """`re_decode` without judging the result."""
    return SpecComposer(spec_yaml, config_dir).draft(overrides)


def draft(words: Sequence[str], config_dir: Path | None = None) -> JobDraft:
    """Compose files and command line without checking the result. Raises SpecError where Hydra fails."""
    return make_composer(config_dir).draft(words)


def make_composer(config_dir: Path | None = None) -> Composer:
    """Return an object that drafts jobs of the files as they are now."""
    with hydra_session(default_registry(), config_dir) as loader:
        return Composer(loader, config_dir)


class Composer:
    """Drafts jobs, also after its Hydra session: it reads each file once, and composes equal choices once."""

    def __init__(self, loader: ConfigLoader, config_dir: Path | None = None) -> None:
        assert isinstance(loader, ConfigLoaderImpl)
        self._config_dir = config_dir
        self._repository = CachingConfigRepository(loader.repository)
        self._groups = groups_of(default_registry())
        self._options = cache(partial(group_options, loader.get_sources()))
        self._composed: dict[tuple[str, ...], ComposedFiles | Problem] = {}

    def draft(self, words: Sequence[str]) -> JobDraft:
        """As the function of this name."""
        typed, problems = read_overrides(words, self._groups)
        typed, notes = with_demo(typed)
        files, _, unsure = self.files([t for t in typed if t.choice], problems)
        wrong = misplaced_choices(files, self._groups)
        unsure |= {p.key.removesuffix(".name") for p in wrong}
        result = _overlay_command_line(files, typed, problems + wrong)
        return replace(result, unsure=unsure, notes=notes + files.notes, config_dir=self._config_dir)

    def files(
        self, choices: Sequence[TypedOverride], problems: list[Problem]
    ) -> tuple[ComposedFiles, list[TypedOverride], frozenset[str]]:
        """Return the composed files (a copy), the valid choices, and the groups that invalid choices affect.

        Adds to the `problems` so far. Raises SpecError with them.
        """
        kept, wrong, unsure = _check_choices(choices, self._options, self._groups)
        problems += wrong
        lines = tuple(line_of(choice) for choice in kept)
        if lines not in self._composed:
            try:
                self._composed[lines] = compose_files(self._repository, kept)
            except Uncomposable as error:
                self._composed[lines] = error.problem
        found = self._composed[lines]
        if isinstance(found, Problem):
            raise SpecError([*problems, found])
        return replace(found, config=copy.deepcopy(found.config)), kept, unsure


class SpecComposer:
    """Drafts jobs over a saved spec, which is read once. composer: reads the files of chosen components."""

    def __init__(self, spec_yaml: Path, config_dir: Path | None = None, composer: Composer | None = None) -> None:
        self._path, self._config_dir, self._composer = spec_yaml, config_dir, composer
        self._config, self._translated = _load_spec(spec_yaml)

    def draft(self, overrides: Sequence[str]) -> JobDraft:
        """As the function `re_draft`."""
        typed, problems = read_overrides(overrides, groups_of(default_registry()))
        config = copy.deepcopy(self._config)
        origins = {key: SPEC for key, _ in iter_leaves(OmegaConf.to_container(config))}
        choices = [t for t in typed if t.choice]
        if any(t.key == GROUP for t in choices):
            problems.append(Problem(GROUP, "a spec is already a full job; it takes single overrides", COMMAND_LINE))
            choices = [t for t in choices if t.key != GROUP]
        notes: tuple[str, ...] = (f"{self._path}: {self._translated}",) if self._translated else ()
        if choices or self._config_dir:
            files, kept, _ = (self._composer or make_composer(self._config_dir)).files(choices, problems)
            _replace_sections(config, origins, files, kept)
            notes += files.notes if kept else ()
        result = _overlay_command_line(ComposedFiles(config, origins), typed, problems)
        return replace(result, notes=notes, config_dir=self._config_dir)


def decode_draft(drafted: JobDraft, registry: Registry) -> ComposedJob:
    """Decode a draft, and look for the recipes of upstream runs.

    Raises SpecError with the draft's problems and the decoder's.
    """
    problems = list(drafted.problems)
    spec = None
    try:
        spec = _add_config_dir(decode(drafted.data, drafted.origins, registry), drafted.config_dir)
        problems += unknown_recipes(spec, drafted.origins)
    except SpecError as error:
        said = {p.key for p in problems}
        problems += [p for p in error.problems if p.key not in said and not _is_doubtful(p, drafted.unsure, registry)]
    if problems or spec is None:
        raise SpecError(problems)
    return ComposedJob(spec, spec.model_dump(mode="json"), drafted.origins, drafted.overrides, drafted.notes)


def _is_doubtful(problem: Problem, unsure: frozenset[str], registry: Registry) -> bool:
    """Whether a problem may only come from the component that was taken in place of an unknown one."""
    group, _, key = problem.key.partition(".")
    if problem.key in unsure:
        return True
    if group in unsure:
        return not key or any(key in cls.model_fields for cls in registry.classes(group).values())
    return any(f"{name}=" in problem.message for name in unsure)


def _check_choices(
    choices: Iterable[TypedOverride], known: Callable[[str], Sequence[str]], groups: Sequence[str]
) -> tuple[list[TypedOverride], list[Problem], frozenset[str]]:
    """The choices that can be composed, the problems of the others, and the groups that these affect."""
    kept, problems = [], []
    unsure: set[str] = set()
    for choice in choices:
        group, _, package = choice.key.partition("@")
        good, wrong = check_choice(choice, known(group))
        problems += wrong
        if wrong:
            unsure.update(groups if choice.key == GROUP else [package or choice.key])
        if good:
            kept.append(good)
    return kept, problems, frozenset(unsure)


def _overlay_command_line(
    files: ComposedFiles, typed: Sequence[TypedOverride], problems: Sequence[Problem]
) -> JobDraft:
    """The command line's values on top of the files', all interpolations resolved."""
    named = {key: name for t in typed if not t.choice for key, name in iter_leaves(t.value, t.key) if _is_choice(key)}
    wrong = [problem(key, f"select a component with {key.removesuffix('.name')}={name}") for key, name in named.items()]
    second = {t.key.partition("@")[2]: t for t in typed if t.choice and "@" in t.key}
    wrong += [
        problem(t.key, f"set twice, as {second[t.key].line} and as {t.line}; leave one of them out")
        for t in typed
        if t.key in second and not isinstance(t.value, dict)
    ]
    of_sweep = [t for t in typed if is_sweep(t.key)]
    wrong += [problem(t.key, f"is an option of a sweep; {SWEEP_ALONE}") for t in of_sweep]
    skipped = [*named, *(t.key for t in of_sweep)]
    values = [t for t in typed if not t.choice and not any(f"{key}.".startswith(f"{t.key}.") for key in skipped)]
    found = [*problems, *wrong, *apply_values(files.config, values)]
    of_files = {key: who for key, who in files.origins.items() if not key.startswith("hydra.")}
    origins = of_files | {key: COMMAND_LINE for t in values for key in _keys_set_by(t, of_files)}
    data, broken = resolve_interpolations(files.config, origins)
    data, translated, wrong_model = with_second_models(data, origins, default_registry())
    broken += with_origins(wrong_model, origins)
    drafted = JobDraft(data, translated, [t.line for t in typed], found + broken)
    return replace(drafted, entries=files.entries, sweep=files.sweep, sweep_origins=files.sweep_origins)


def _keys_set_by(typed: TypedOverride, origins: Mapping[str, str]) -> set[str]:
    """The keys that a value sets, and the single value that it makes a section of, if there is one."""
    parts = typed.key.split(".")
    above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return {key for key, _ in iter_leaves(typed.value, typed.key)} | (above & origins.keys())


def _is_choice(key: str) -> bool:
    group, _, leaf = key.partition(".")
    return leaf == "name" and group in groups_of(default_registry())


def _replace_sections(
    config: DictConfig, origins: dict[str, str], files: ComposedFiles, kept: Sequence[TypedOverride]
) -> None:
    """Replace a spec's sections by newly chosen components."""
    chosen_sections = [choice.key.rpartition("@")[2] for choice in kept]
    if EVALUATION in chosen_sections:  # a preset adds a set, and leaves the section's others
        chosen_sections.remove(EVALUATION)
        sets = OmegaConf.select(files.config, f"{EVALUATION}.sets")
        chosen_sections += [f"{EVALUATION}.sets.{name}" for name in sets]
    for section in chosen_sections:
        for key in [k for k in origins if f"{k}.".startswith(f"{section}.")]:
            del origins[key]
        chosen = OmegaConf.select(files.config, section)
        OmegaConf.update(config, section, {} if chosen is None else chosen, merge=False)  # no callback has no section
        origins |= {k: who for k, who in files.origins.items() if k.startswith(f"{section}.")}


def _load_spec(path: Path) -> tuple[DictConfig, str]:
    """A saved spec in the options of this version, and what was translated."""
    if not path.is_file():
        raise EnvironmentProblem(f"{path}: no such file; expected the spec.yaml of a run")
    try:
        config = load_yaml(path.read_text(encoding="utf-8"), str(path))
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError([composition_problem(error, (), ())]) from error
    content = OmegaConf.to_container(config)
    if not isinstance(content, dict):
        raise SpecError([Problem("", f"{path}: expected the sections of a job")])
    saved = translate_spec({str(name): value for name, value in content.items()})
    spec: DictConfig = OmegaConf.create(escape_interpolations(saved.data))
    return spec, saved.note
