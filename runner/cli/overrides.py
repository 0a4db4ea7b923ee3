"""Command-line overrides, parsed with Hydra's grammar: choices of components, values, and mistakes.

Interpolations are resolved here too, all at the start; none of them may read a secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from runner.cli.config_sources import GROUP, is_file_name, recipe_file_problem, recipe_member_name
from runner.core.errors import Problem, SecurityError
from runner.spec import suggest
from runner.spec.base import COMMAND_LINE, origin_of
from runner.spec.decode import MISSING
from runner.spec.registry import default_registry
from runner.spec.schema import CALLBACKS, EVALUATION, MODEL, second_model_keys

DEMO = "sft_demo"
SEVERAL = (GROUP, CALLBACKS, EVALUATION)  # of which several may be chosen
TRUST = "model.trust_remote_code="  # a run's spec.yaml may not say so: whoever uses the run says it again
SWEEP_ALONE = "to start a sweep over several values, type: run -m …"
NO_MODEL = "no model is set: using model=tiny with random weights; for a real one, type model=hf model.path=FOLDER"


@dataclass(frozen=True, slots=True)
class TypedOverride:
    """One override `key=value`. A choice names components of a group (or recipes); a value is any value."""

    line: str
    key: str
    value: Any
    choice: bool

    @property
    def names(self) -> list[str]:
        """The components chosen."""
        return [str(v) for v in self.value] if isinstance(self.value, list) else [str(self.value)]


def problem(key: str, message: str) -> Problem:
    """A problem of the command line's."""
    return Problem(key, message, COMMAND_LINE)


def read_overrides(words: Iterable[str], groups: Collection[str]) -> tuple[list[TypedOverride], list[Problem]]:
    """The overrides among `words`, and what is wrong with the others."""
    typed: dict[str, TypedOverride] = {}
    problems: list[Problem] = []
    for word in words:
        override = _parse(word)
        got = override if isinstance(override, Problem) else _classify(override, word, groups)
        if isinstance(got, Problem):
            problems.append(got)
        elif got.key in typed:
            text = f"set twice, as {typed[got.key].line} and as {word}"
            if got.key == GROUP:
                text += f"; for several recipes type +recipe=[{typed[got.key].value},{got.value}]"
            problems.append(problem(got.key, text))
        else:
            typed[got.key] = got
    return list(typed.values()), problems


@cache
def _parse(word: str) -> Override | Problem:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        key, equals, value = word.partition("=")
        if value.startswith("~/") and "'" not in value:  # a quoted word, or a shell that expands none after an equals
            return _parse(f"{key}='{Path(value).expanduser()}'")
        if (at_home := with_home(word)) != word:
            return _parse(at_home)
        if not equals:
            if is_file_name(word):
                return problem(word, f"not an override; to use a recipe file, type +{GROUP}={word}")
            return problem(word, f"not an override; type {word.lstrip('+~')}=VALUE")
        return problem(key.lstrip("+"), f"cannot read {value or 'an empty value'}; quote it: '{key}=\"{value}\"'")


def with_home(word: str) -> str:
    """A word with the home folder in place of each ~/ that begins one of several values."""
    return re.sub(r"(?<=[=,\[])~/", f"{Path.home()}/", word)


def _classify(override: Override, word: str, groups: Collection[str]) -> TypedOverride | Problem:
    """An override that this runner takes, or why not."""
    key, value = override.key_or_group, override.value()
    if key == "hydra" or override.is_hydra_override():
        return problem(key, instead_of_hydras(key, value))
    if override.is_delete():
        return problem(
            word, "an option cannot be removed; set another value, or edit a copy of the recipe in ./recipes"
        )
    if override.package is not None:
        return _second_model(override, word)
    if "/" in key:
        return problem(word, f"there is no such group; groups are {', '.join(groups)}")
    if override.is_sweep_override():
        several = f"{override.get_value_string()} is several values"
        written = f"'{key}=[{override.get_value_string()}]'" if override.is_choice_sweep() else "[1,2]"
        return problem(key, f"{several}; type a list as {written}; {SWEEP_ALONE}")
    choice = key in (*groups, *SEVERAL) and not isinstance(value, dict)
    if choice and isinstance(value, list) and key not in SEVERAL:
        several = "; for a weighted sum type reward=sum reward.parts=[…]" if key == "reward" else ""
        return problem(key, f"takes one choice, not a list{several}")
    return TypedOverride(word, key, "null" if choice and value is None else value, choice)


def instead_of_hydras(key: str, value: Any = None) -> str:
    """What does the same as a setting of Hydra's."""
    from runner.spec import migrate

    said = migrate.answer(key, value, suggest.NO_JOB, {}) or migrate.answer("hydra.*", None, suggest.NO_JOB, {})
    return f"Hydra's own settings are not used; {said}"


def _second_model(override: Override, word: str) -> TypedOverride | Problem:
    """The choice of a second model, for an option that takes one (model@algorithm.teacher=hf), or why not."""
    group, package, value = override.key_or_group, str(override.package), override.value()
    known = second_model_keys(default_registry())
    if group != MODEL or package not in known:
        there = [f"{MODEL}@{one}" for one in known]
        hint = suggest.did_you_mean(f"{group}@{package}", there)
        return problem(word, f"no option {group}@{package}{hint} (to set a second model, type {', '.join(there)})")
    if not isinstance(value, str):
        return problem(f"{group}@{package}", "takes one choice")
    return TypedOverride(word, f"{group}@{package}", value, True)


def with_demo(typed: Sequence[TypedOverride]) -> tuple[list[TypedOverride], tuple[str, ...]]:
    """Add the demo where no recipe, model or data is chosen, and a line that says what was added."""
    chosen = {t.key: t.names[0] for t in typed if t.choice and t.names}
    if chosen.keys() & {GROUP, "model", "data"}:
        unsaid = not chosen.keys() & {GROUP, "model"} and chosen["data"] != "demo"
        return list(typed), (NO_MODEL,) if unsaid else ()
    note = f"no recipe, model or data is set: using +{GROUP}={DEMO}"
    return [TypedOverride(f"+{GROUP}={DEMO}", GROUP, DEMO, True), *typed], (note,)


def check_choice(choice: TypedOverride, known: Collection[str]) -> tuple[TypedOverride | None, list[Problem]]:
    """The choice, corrected to the nearest name (None if nothing is near), and a problem for each error."""
    kept, problems = [], []
    for name in choice.names:
        if choice.key == GROUP and is_file_name(name):
            wrong = recipe_file_problem(name)
            kept += [] if wrong else [recipe_member_name(name)]
            problems += [problem(GROUP, wrong)] if wrong else []
            continue
        if name in known:
            kept.append(name)
            continue
        group = choice.key.partition("@")[0]
        meant = suggest.suggest_name(group, name, known)
        kept += [meant] if meant else []
        problems.append(problem(choice.key, suggest.unknown_name(group, name, known) + _as_path(choice.key, name)))
    value = kept if choice.key in SEVERAL else kept[0] if kept else None
    return (TypedOverride(choice.line, choice.key, value, True) if kept or not choice.names else None), problems


def _as_path(group: str, name: str) -> str:
    if group == GROUP and Path(f"{name}.yaml").expanduser().is_file():
        return f"; to use a file, type +{GROUP}={name}.yaml"
    if "/" not in name and "." not in name:
        return ""
    if "@" in group:
        return f"; to set a path, type {group.partition('@')[2]}={name}"
    member = {"model": "hf", "data": "file"}.get(group)
    return f"; to set a path, type {group}={member} {group}.path={name}" if member else ""


def apply_values(config: DictConfig, values: Iterable[TypedOverride]) -> list[Problem]:
    """Set values in `config`, known and unknown keys alike, which the decoder checks; returns failures."""
    problems = []
    for typed in values:
        try:
            OmegaConf.update(config, typed.key, typed.value, merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            problems.append(problem(typed.key, str(error).splitlines()[0]))
    return problems


SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def resolve_interpolations(config: DictConfig, origins: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """`config` as plain data, and a problem for each interpolation that cannot be resolved (left `???`).

    Raises SecurityError if one reads an environment variable that looks like a secret.
    """
    problems: list[Problem] = []
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)

    def resolve(value: Any, key: str) -> Any:
        if isinstance(value, dict):  # whose keys may have dots, as a column's name has
            return {name: resolve(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
        if "${" in str(value):
            try:
                return _value(config, key)
            except OmegaConfBaseException as error:
                _raise_refusal(error, key, origins)
                why = str(error).splitlines()[0].rpartition("raised while resolving interpolation: ")[2]
                problems.append(Problem(key, f"{value}: {why}", origin_of(key, origins)))
                return MISSING
        return value

    with _guarded_environment():
        data: dict[str, Any] = resolve(raw, "")
    return data, problems


def escape_interpolations(value: Any) -> Any:
    """Plain data as a config whose texts mean themselves."""
    if isinstance(value, dict):
        return {name: escape_interpolations(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _value(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _environment(name: str, *default: str) -> Any:
    if SECRET.search(name):
        raise SecurityError(
            f"${{oc.env:{name}}} looks like a secret; it would be written to spec.yaml and sent to trackers. Leave it "
            "out: libraries read it from the environment"
        )
    return oc.env(name, *default)


@contextmanager
def _guarded_environment() -> Iterator[None]:
    OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _raise_refusal(error: BaseException | None, key: str, origins: Mapping[str, str]) -> None:
    while error is not None:
        if isinstance(error, SecurityError):
            raise SecurityError(f"{key}: {error}  [{origin_of(key, origins)}]") from None
        error = error.__cause__ or error.__context__
