"""A second model, composed as a member of the group `model` where an option takes a model's path.

+model@algorithm.teacher=hf algorithm.teacher.path=/models/big
    ─▶ algorithm: {teacher: {name: hf, path: /models/big, …}}  ─▶  algorithm: {teacher: /models/big}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.spec import suggest
from runner.spec.base import ComponentConfig
from runner.spec.registry import Registry
from runner.spec.schema import MODEL, groups_of

Found = tuple[str, str]  # key, message


def with_second_models(
    data: Mapping[str, Any], origins: Mapping[str, str], registry: Registry
) -> tuple[dict[str, Any], dict[str, str], list[Found]]:
    """Data and origins with each second model as the options that its owner has for it, and what is wrong with it."""
    filled, sources, found = dict(data), dict(origins), list[Found]()
    for group in groups_of(registry):
        section = data.get(group)
        cls = registry.classes(group).get(str(section.get("name"))) if isinstance(section, Mapping) else None
        for option, own in (cls.models if cls else {}).items():
            if isinstance(section, Mapping) and isinstance(section.get(option), Mapping):
                values, wrong = _own(f"{group}.{option}", section, section[option], own, registry)
                filled[group] = {**filled[group], **{name: value for name, (value, _) in values.items()}}
                sources = {key: who for key, who in sources.items() if not key.startswith(f"{group}.{option}.")}
                sources |= {f"{group}.{name}": origins.get(key, "") for name, (_, key) in values.items()}
                found += wrong
    return filled, sources, found


def _own(
    key: str, section: Mapping[str, Any], model: Mapping[str, Any], own: Mapping[str, str], registry: Registry
) -> tuple[dict[str, tuple[Any, str]], list[Found]]:
    """What an owner's options become (with the key that says so), and what is wrong with the model."""
    group, _, option = key.partition(".")
    cls = registry.classes(MODEL).get(str(model.get("name")))
    missing = {option: ("???", key)}
    if cls is None:
        how = f"type {MODEL}@{key}={_usual(registry)} {key}.path=…, or {key}=PATH"
        return missing, [(key, f"a section without the name of a model; {how}")]
    if "path" not in cls.model_fields:
        made = f"{MODEL}={cls.component_name()} has random weights"
        return missing, [(key, f"{made}; a second model needs trained weights: {MODEL}@{key}={_usual(registry)}")]
    # the option itself takes the path, or it is null beside one that does
    values, found = (missing if option in own.values() else {option: (None, key)}), list(_unused(key, model, own, cls))
    for name, mine in own.items():
        value, before = model.get(name), section.get(mine)
        if name == "path" and value in (None, "???"):
            found.append((key, f"must be given: {key}.path=…"))
        elif value is not None:
            values = values | {mine: (value, f"{key}.{name}")}
            if mine != option and before not in (None, value):
                found.append((f"{group}.{mine}", f"is {before}, and {key}.{name} is {value}; leave one of them out"))
    return values, found


def _unused(key: str, model: Mapping[str, Any], own: Mapping[str, str], cls: type[ComponentConfig]) -> Iterator[Found]:
    """What is set of the model and means nothing where it only scores."""
    for name, value in model.items():
        if name not in cls.model_fields:
            close = suggest.nearest(name, cls.model_fields)
            hint = f"; did you mean '{close}'?" if close else ""
            yield f"{key}.{name}", f"not an option of {MODEL}={cls.component_name()}{hint}"
        elif name != "name" and name not in own and value != cls.model_fields[name].default:
            names = ", ".join(f"{key}.{name}" for name in own)
            yield f"{key}.{name}", f"not used of a model that only scores; there is {names}"


def _usual(registry: Registry) -> str:
    """The model that any folder is."""
    return next(name for name, cls in registry.classes(MODEL).items() if "path" in cls.model_fields)
