"""The schema of a job as data: for editors (JSON Schema), for suggestions, and for `run explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property, reduce
from operator import or_
from typing import Any

from pydantic import BaseModel, Field, create_model

from runner.spec import suggest
from runner.spec.base import ComponentConfig
from runner.spec.job import CallbacksConfig, JobSpec
from runner.spec.registry import Registry, default_registry

MODEL = "model"
CALLBACKS = "callbacks"  # the group of which a job has any number: name → options
EVALUATION = "evaluation"  # its presets are named sets, of which a job has any number
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def groups_of(registry: Registry) -> tuple[str, ...]:
    """The groups that a job has one component of, in the order of its fields."""
    known = registry.groups()
    return tuple(name for name in JobSpec.model_fields if name in known and name != CALLBACKS)


def second_model_keys(registry: Registry) -> tuple[str, ...]:
    """The options that take a second model, by their dotted keys."""
    groups = groups_of(registry)
    found = (f"{group}.{name}" for group in groups for cls in registry.classes(group).values() for name in cls.models)
    return tuple(dict.fromkeys(found))


def sections() -> dict[str, type[BaseModel]]:
    """The parts of a job that are no group: evaluation, watch."""
    annotations = {name: info.annotation for name, info in JobSpec.model_fields.items()}
    return {
        name: cls
        for name, cls in annotations.items()
        if isinstance(cls, type)
        and issubclass(cls, BaseModel)
        and not issubclass(cls, ComponentConfig | CallbacksConfig)
    }


@cache
def model_schema(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """JSON Schema of each option of a config class."""
    properties: dict[str, dict[str, Any]] = model.model_json_schema()["properties"]
    return properties


class OptionIndex:
    """Every option there is: section → member → names; sections that are no group have one member, ""."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    @cached_property
    def options(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """section → member → option names; the section "" is the top level."""
        found: dict[str, dict[str, tuple[str, ...]]] = {"": {"": tuple(JobSpec.model_fields)}}
        for group in groups_of(self.registry):
            found[group] = {name: tuple(cls.model_fields) for name, cls in self.registry.classes(group).items()}
        found |= {name: {"": tuple(cls.model_fields)} for name, cls in sections().items()}
        callbacks = self.registry.classes(CALLBACKS).items()
        return found | {f"{CALLBACKS}.{name}": {"": tuple(cls.model_fields)} for name, cls in callbacks}


def job_schema(registry: Registry | None = None) -> dict[str, Any]:
    """JSON Schema of a job (spec.yaml): in each group a union of its components, discriminated by `name`."""
    known = registry or default_registry()
    fields: dict[str, Any] = {group: _union(group, known) for group in groups_of(known)}
    model = create_model("Job", __base__=JobSpec, __doc__="One run: everything that defines it.", **fields)
    return {"$schema": DIALECT, **model.model_json_schema()}


def recipe_schema(
    options: Mapping[str, list[str]], beside: Mapping[str, type[BaseModel]], registry: Registry | None = None
) -> dict[str, Any]:
    """JSON Schema of a recipe: a job with optional parts, and a defaults list that picks from `options`.

    beside: sections that a recipe may have and no job has
    """
    schema = job_schema(registry)
    for definition in schema["$defs"].values():
        definition.pop("required", None)
    for field in schema["properties"].values():
        # A recipe's section has no name: it fits every component that has its options.
        field.pop("discriminator", None)
        if "oneOf" in field:
            field["anyOf"] = field.pop("oneOf")
    del schema["required"]
    overrides: dict[str, Any] = {f"override /{group}": {"enum": names} for group, names in options.items()}
    overrides |= {f"override /{key}": {"type": "array", "items": {"type": "string"}} for key in (CALLBACKS, EVALUATION)}
    second = {
        f"/{MODEL}@{package}": {"enum": options[MODEL]} for package in second_model_keys(registry or default_registry())
    }
    overrides |= second | {f"override {key}": value for key, value in second.items()}
    choice = {"type": "object", "properties": overrides, "additionalProperties": False, "maxProperties": 1}
    defaults = {
        "description": "Which component each group uses; a plain name extends another recipe.",
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, choice]},
    }
    more = {name: cls.model_json_schema() for name, cls in beside.items()}
    schema["properties"] = {"defaults": defaults, **schema["properties"], **more}
    return schema | {"title": "Recipe", "description": "A runnable experiment."}


def _union(group: str, registry: Registry) -> tuple[Any, Any]:
    classes = list(registry.classes(group).values())
    about = (JobSpec.model_fields[group].annotation or JobSpec).__doc__
    if len(classes) == 1:
        return classes[0], Field(description=about)
    return reduce(or_, classes[1:], classes[0]), Field(discriminator="name", description=about)


Found = tuple[str, str]  # key, message


def with_second_models(
    data: Mapping[str, Any], origins: Mapping[str, str], registry: Registry
) -> tuple[dict[str, Any], dict[str, str], list[Found]]:
    """Data and origins with each second model as options of its owner, and the problems with it."""
    filled, sources, found = dict(data), dict(origins), list[Found]()
    for group in groups_of(registry):
        section = data.get(group)
        cls = registry.classes(group).get(str(section.get("name"))) if isinstance(section, Mapping) else None
        for option, own in (cls.models if cls else {}).items():
            if isinstance(section, Mapping) and isinstance(section.get(option), Mapping):
                values, wrong = _owner_options(f"{group}.{option}", section, section[option], own, registry)
                filled[group] = {**filled[group], **{name: value for name, (value, _) in values.items()}}
                sources = {key: who for key, who in sources.items() if not key.startswith(f"{group}.{option}.")}
                sources |= {f"{group}.{name}": origins.get(key, "") for name, (_, key) in values.items()}
                found += wrong
    return filled, sources, found


def _owner_options(
    key: str, section: Mapping[str, Any], model: Mapping[str, Any], own: Mapping[str, str], registry: Registry
) -> tuple[dict[str, tuple[Any, str]], list[Found]]:
    """What an owner's options become (with the key that says so), and what is wrong with the model."""
    group, _, option = key.partition(".")
    cls = registry.classes(MODEL).get(str(model.get("name")))
    missing = {option: ("???", key)}
    if cls is None:
        how = f"type {MODEL}@{key}={_path_model_name(registry)} {key}.path=…, or {key}=PATH"
        return missing, [(key, f"the section does not name a model; {how}")]
    if "path" not in cls.model_fields:
        text = f"{MODEL}={cls.component_name()} has random weights; a second model needs trained weights"
        return missing, [(key, f"{text}: {MODEL}@{key}={_path_model_name(registry)}")]
    # the option itself takes the path, or it is null beside one that does
    found = list(_unused_options(key, model, own, cls))
    values = missing if option in own.values() else {option: (None, key)}
    for name, mine in own.items():
        value, before = model.get(name), section.get(mine)
        if name == "path" and value in (None, "???"):
            found.append((key, f"must be given: {key}.path=…"))
        elif value is not None:
            values = values | {mine: (value, f"{key}.{name}")}
            if mine != option and before not in (None, value):
                found.append((f"{group}.{mine}", f"is {before}, but {key}.{name} is {value}; leave one of them out"))
    return values, found


def _unused_options(
    key: str, model: Mapping[str, Any], own: Mapping[str, str], cls: type[ComponentConfig]
) -> Iterator[Found]:
    """What is set of the model and means nothing where it only scores."""
    for name, value in model.items():
        if name not in cls.model_fields:
            hint = suggest.did_you_mean(name, cls.model_fields)
            yield f"{key}.{name}", f"not an option of {MODEL}={cls.component_name()}{hint}"
        elif name != "name" and name not in own and value != cls.model_fields[name].default:
            names = ", ".join(f"{key}.{name}" for name in own)
            yield f"{key}.{name}", f"not used for a model that only scores; its options are {names}"


def _path_model_name(registry: Registry) -> str:
    """The model that any folder is."""
    return next(name for name, cls in registry.classes(MODEL).items() if "path" in cls.model_fields)
