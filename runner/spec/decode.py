"""From plain data to a job spec, with every problem found at once.

    data ──▶ the class of each group, by name ──▶ one model of these classes ──▶ contradictions ──▶ JobSpec
                    unknown names                unknown keys, types, ranges      between parts

Only the classes that were chosen are built by pydantic, so that an answer takes milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from runner.core.errors import Problem, SecurityError, SpecError
from runner.spec import suggest
from runner.spec.base import COMMAND_LINE, ComponentConfig, Config, iter_leaves, origin_of, value_at
from runner.spec.job import AUTO_NAME, CallbacksConfig, JobSpec
from runner.spec.registry import Registry, default_registry
from runner.spec.schema import CALLBACKS, OptionIndex, groups_of, model_schema
from runner.spec.suggest import NO_JOB, Job, format_value, unknown_name, value_complaint

MISSING = "???"
TRUST_KEY = "trust_remote_code"
Path = tuple[str, ...]
Found = tuple[str, str]  # key, message


def decode(data: Mapping[str, Any], origins: Mapping[str, str], registry: Registry | None = None) -> JobSpec:
    """The job that `data` describes.

    `origins` says who set each dotted key. Raises SpecError with every problem, and SecurityError for data that
    names code to run.
    """
    known = registry or default_registry()
    refuse_code(data, origins)
    chosen, found = _choose(data, known)
    found += _callbacks(data, known)[1]
    data, missing = _missing(data, chosen)
    keys = OptionIndex(known)
    job, wrong, replaced = _validate(data, chosen, keys)
    found += missing + wrong
    if job is not None:
        job = _with_device_defaults(job)
        found += [item for item in _contradictions(job) if not _mentions(item, replaced)]
        if job.epochs is not None and origins.get("steps") == COMMAND_LINE:
            whose = origin_of("epochs", origins)
            way = "leave one of them out" if whose == COMMAND_LINE else "leave it out, or type epochs=null too"
            found.append(("steps", f"{job.steps}, but epochs={job.epochs:g} decides (set by: {whose}); {way}"))
    if found:
        raise SpecError(_with_advice(with_origins(found, origins), chosen, keys))
    assert job is not None  # no problem was found
    return job


def decode_unchecked(
    data: Mapping[str, Any], origins: Mapping[str, str], registry: Registry | None = None
) -> JobSpec | None:
    """The job that `data` describes, without checks between its parts; `???` for a required text.

    A wrong value, which `decode` reports, is replaced by its option's default; None where that leaves no job.
    Raises SecurityError as `decode` does.
    """
    known = registry or default_registry()
    refuse_code(data, origins)
    chosen, _ = _choose(data, known)
    job, _, _ = _validate(data, chosen, OptionIndex(known))
    return None if job is None else _with_device_defaults(job)


def refuse_code(data: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raise SecurityError if `data` names code to run, or trusts a model's code outside the command line."""
    for key, value in iter_leaves(data):
        if any(part in ("_target_", "_partial_") for part in key.split(".")) or _has_target_key(value):
            raise SecurityError(
                f"{key}: a config can name registered components only, not code (set by: "
                f"{origin_of(key, origins) or 'a file'})\n"
                "  remove it; to add a component, register its config class (entry-point group runner.components)"
            )
        if key.endswith(TRUST_KEY) and value is True and origin_of(key, origins) != COMMAND_LINE:
            raise SecurityError(
                f"{key}: only the command line may allow a model to run its own code, not "
                f"{origin_of(key, origins) or 'a file'}\n"
                f"  if you have read that code, type {key}=true"
            )


def with_origins(found: Iterable[Found], origins: Mapping[str, str]) -> list[Problem]:
    """Problems in the order found, the first of each key, with who set it."""
    first: dict[str, str] = {}
    for key, message in found:
        first.setdefault(key, message)
    return [Problem(key, message, origin_of(key, origins)) for key, message in first.items()]


Callbacks = tuple[tuple[str, type[ComponentConfig]], ...]


@cache
def job_model(
    classes: tuple[tuple[str, type[ComponentConfig] | None], ...], callbacks: Callbacks = ()
) -> type[JobSpec]:
    """JobSpec with each group narrowed to its chosen class; a group whose class is None is not checked."""
    fields: dict[str, Any] = {
        group: (Any if cls is None else cls, None if cls is None else ...) for group, cls in classes
    }
    if callbacks:
        own: dict[str, Any] = {name: (cls, ...) for name, cls in callbacks}
        fields[CALLBACKS] = (create_model("CallbacksConfig", __base__=CallbacksConfig, **own), ...)
    return create_model("JobSpec", __base__=JobSpec, __module__=__name__, **fields)


def _callbacks(data: Mapping[str, Any], registry: Registry) -> tuple[Callbacks, list[Found]]:
    """The class of each callback that the data choose, and what is wrong with the others."""
    members, section = registry.classes(CALLBACKS), data.get(CALLBACKS)
    chosen, found = [], list[Found]()
    for key, options in section.items() if isinstance(section, Mapping) else ():
        name = options.get("name") if isinstance(options, Mapping) else None
        if isinstance(name, str) and name in members:
            chosen.append((str(key), members[name]))
        elif name is None and key in members:
            text = f"is not chosen; type {CALLBACKS}={key}, or several: '{CALLBACKS}=[{key},…]'"
            found.append((f"{CALLBACKS}.{key}", text))
        else:
            found.append((f"{CALLBACKS}.{key}", unknown_name("callback", str(name or key), members)))
    return tuple(chosen), found


Classes = dict[str, type[ComponentConfig] | None]


def _choose(data: Mapping[str, Any], registry: Registry) -> tuple[Classes, list[Found]]:
    """The class of each group, None where the data names none."""
    chosen: Classes = {}
    found: list[Found] = []
    for group in groups_of(registry):
        members = registry.classes(group)
        section = data.get(group)
        name = section.get("name") if isinstance(section, Mapping) else None
        chosen[group] = members.get(name) if isinstance(name, str) else None
        if section is not None and not isinstance(section, Mapping):
            found.append((group, f"expected a section of options, got {format_value(section)}"))
        elif name is None:
            found.append((group, f"no component is chosen; type {group}=NAME ({', '.join(sorted(members))})"))
        elif chosen[group] is None:
            found.append((group, unknown_name(group, str(name), members)))
    return chosen, found


def _missing(data: Mapping[str, Any], chosen: Classes) -> tuple[dict[str, Any], list[Found]]:
    """The data without its `???`, and a problem for each."""
    found = []
    for key, value in iter_leaves(data):
        if value == MISSING:
            group, _, field = key.partition(".")
            found.append((key, _must_be_given(key, (chosen.get(group), field))))
    return _without(data, [tuple(key.split(".")) for key, _ in found]), found


def _must_be_given(key: str, where: tuple[type[BaseModel] | None, str]) -> str:
    model, field = where
    info = model.model_fields.get(field) if model else None
    return f"must be given: {key}=…" + (f"  ({info.description})" if info and info.description else "")


def _validate(
    data: Mapping[str, Any], chosen: Classes, keys: OptionIndex
) -> tuple[JobSpec | None, list[Found], list[str]]:
    """The job, what is wrong, and the keys whose wrong values the job has the defaults of.

    No job where a component is unknown or a wrong value has no default.
    """
    model = job_model(tuple(chosen.items()), _callbacks(data, keys.registry)[0])
    try:
        whole = model.model_validate(data)
        return (whole if None not in chosen.values() else None), [], []
    except ValidationError as error:
        errors = [_Error.of(e["type"], e["loc"], model) for e in error.errors(include_url=False, include_input=False)]
    unknown = [item for e in errors if e.path[-1] not in e.model.model_fields for item in _unknown_keys(e, data)]
    context = _context(data, chosen, dict(unknown)) if unknown else NO_JOB
    judged = [e for e in errors if chosen.get(e.path[0], True) is not None]
    found = [item for e in judged for item in _messages(e, data, chosen, keys, context)]
    if any(e.kind == "missing" for e in errors):
        return None, found, []
    job, _, _ = _validate(_without(data, [e.path for e in errors]), chosen, keys)
    return job, found, [e.key for e in errors if e.path[-1] in e.model.model_fields]


@dataclass(frozen=True, slots=True)
class _Error:
    """One of pydantic's errors: its type and the path of the option it is about."""

    kind: str
    path: Path
    model: type[BaseModel]  # whose field `path[-1]` is, or would be

    @classmethod
    def of(cls, kind: str, loc: Sequence[int | str], model: type[BaseModel]) -> _Error:
        """Cut pydantic's location, which continues into unions and list items, to the option itself."""
        for depth, part in enumerate(loc, 1):
            info = model.model_fields.get(str(part))
            inner = info.annotation if info else None
            if depth == len(loc) or not (isinstance(inner, type) and issubclass(inner, BaseModel)):
                return cls(kind if depth == len(loc) else "value", tuple(map(str, loc[:depth])), model)
            model = inner
        return cls(kind, (), model)

    @property
    def key(self) -> str:
        return ".".join(self.path)


def _unknown_keys(error: _Error, data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The unknown keys at and below that of an error, with their values.

    A section is split into its options where the table of other frameworks' words has one of them.
    """
    from runner.spec.migrate import table

    value: Any = data
    for name in error.path:
        value = next(inner for key, inner in value.items() if str(key) == name)
    below = list(iter_leaves(value, error.key)) if isinstance(value, Mapping) and value else []
    known = any(table().find(name) for leaf, _ in below for name in (leaf, leaf.rpartition(".")[2]))
    return below if known else [(error.key, value)]


def _context(data: Mapping[str, Any], chosen: Classes, unknown: Mapping[str, Any]) -> Job:
    """The job, with the defaults of its components, for the words of other frameworks in it."""
    from runner.spec.migrate import table

    members = {group: cls.component_name() for group, cls in chosen.items() if cls}
    defaults = {
        f"{group}.{name}": info.default
        for group, cls in chosen.items()
        if cls
        for name, info in cls.model_fields.items()
    }
    top = {name: info.default for name, info in JobSpec.model_fields.items()}
    return table().with_typed(Job(members, top | defaults | dict(iter_leaves(data)), unknown))


def _messages(error: _Error, data: Mapping[str, Any], chosen: Classes, keys: OptionIndex, context: Job) -> list[Found]:
    leaf, section = error.path[-1], ".".join(error.path[:-1])
    if leaf not in error.model.model_fields:
        cls = chosen.get(section)
        owner = cls.component_name() if cls else ""
        return [
            (key, unknown_key(section, owner, key[len(section) + 1 if section else 0 :], keys, value, context))
            for key, value in _unknown_keys(error, data)
        ]
    if error.kind == "missing":
        return [(error.key, _must_be_given(error.key, (error.model, leaf)))]
    return [(error.key, value_complaint(model_schema(error.model)[leaf], error.key, value_at(data, error.key)))]


def unknown_key(section: str, member: str, leaf: str, keys: OptionIndex, value: Any = None, job: Job = NO_JOB) -> str:
    """`not an option of algorithm=grpo; did you mean 'group_size'?`."""
    owner = f"{section}={member}" if member else section or "a job"
    known = f"explain {section}" if section else "help options"
    hint = suggest.suggest_key(section, member, leaf, keys.options, value, job)
    return f"not an option of {owner}; {hint or f'for all options: run {known}'}"


def _with_advice(problems: list[Problem], chosen: Classes, keys: OptionIndex) -> list[Problem]:
    """The problems, with advice at the last option that a recipe left over from another component.

    An option of the algorithm is preferred.
    """
    left = [place for place, problem in enumerate(problems) if _left_over(problem, chosen, keys)]
    if not left:
        return problems
    place = max(left, key=lambda i: (problems[i].key.startswith("algorithm."), i))
    problem, group = problems[place], problems[place].key.partition(".")[0]
    cls, recipe = chosen[group], problem.origin[len("recipe/") :]  # or "recipe FILE"
    assert cls is not None  # it is left over from another one
    way = f"the recipe sets it: remove it from {recipe}, or from a copy of it in ./recipes"
    text = f"{problem.message}; {way}, or use a recipe for {group}={cls.component_name()} (run list recipes)"
    return [*problems[:place], replace(problem, message=text), *problems[place + 1 :]]


def _left_over(problem: Problem, chosen: Classes, keys: OptionIndex) -> bool:
    """Whether a recipe set an option that only other components of the group have."""
    group, _, leaf = problem.key.partition(".")
    cls = chosen.get(group)
    others = {option for options in keys.options.get(group, {}).values() for option in options}
    known = others - cls.model_fields.keys() if cls else set[str]()
    return problem.origin.startswith(("recipe/", "recipe ")) and leaf in known


def _with_device_defaults(job: JobSpec) -> JobSpec:
    """The job with its name and the data types that its device computes in, where they were left out."""
    model = job.model
    if model.dtype is None:
        model = model.model_copy(update={"dtype": job.device.default_dtype})
    reward = job.reward.with_dtype(model.compute_dtype)
    name = _name_from_parts(job) if job.name == AUTO_NAME else job.name
    return job.model_copy(update={"name": name, "model": model, "reward": reward})


def _name_from_parts(job: JobSpec) -> str:
    """The last words of the model's and the data's path, valid as a file name: Qwen3-0.6B-capybara."""
    source = job.data.source if isinstance(job.data.source, str) else job.data.source[0]
    model = (job.model.source or job.model.name).rstrip("/").rpartition("/")[2]
    data = source.rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_.-]+|^[.-]+", "_", f"{model[:40]}-{data[:30]}")


def _contradictions(job: JobSpec) -> list[Found]:
    parts = [job, *(getattr(job, name) for name in type(job).model_fields)]
    return [problem for part in parts if isinstance(part, Config) for problem in part.problems(job)]


def _mentions(found: Found, keys: Iterable[str]) -> bool:
    """Whether a contradiction may come from the default that replaced a wrong value of these options."""
    words = set(re.findall(r"\w+", " ".join(found)))
    return any(key.rpartition(".")[2] in words for key in keys)


def _has_target_key(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_target_key, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_target_key, value))


def _without(data: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """A copy of `data` without the leaves at `paths`."""
    gone = set(paths)
    inner = {p[0]: {q[1:] for q in gone if len(q) > 1 and q[0] == p[0]} for p in gone if len(p) > 1}
    kept = {name: value for name, value in data.items() if (str(name),) not in gone}  # YAML's keys may be numbers
    return {name: _without(value, inner[name]) if name in inner else value for name, value in kept.items()}
