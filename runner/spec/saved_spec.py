"""Reads the spec of a run, also of one that an older version wrote.

spec.yaml ─▶ its schema ─▶ old_specs.yaml: reused, dropped, assumed options ─▶ migrate.yaml: renamed options ─▶ decode
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.core.errors import EnvironmentProblem
from runner.core.package import read_table
from runner.spec import migrate
from runner.spec.base import Config
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry

KEY = "schema"  # of spec.yaml, and of the identity in a checkpoint
SCHEMA = 1  # of what this version writes; a table of old_specs.yaml leads from each older one to the next
TABLE = Path(__file__).with_name("old_specs.yaml")


@dataclass(frozen=True, slots=True)
class SavedSpec:
    """A saved spec in the options of this version. note: what was translated, empty for nothing."""

    data: dict[str, Any]
    note: str = ""


def is_older(saved: Mapping[str, Any]) -> bool:
    """Whether an older version wrote this spec.yaml, or this identity of a checkpoint."""
    return int(saved.get(KEY, 0)) < SCHEMA


def translate_spec(saved: Mapping[str, Any]) -> SavedSpec:
    """A saved spec in the options of this version; unknown options stay, for `decode` to report.

    saved: the content of spec.yaml, or the part of it in a checkpoint's identity. Without a schema it is of the first
    version, or it was written by hand: then options of this version stay as they are. Raises EnvironmentProblem for
    the spec of a newer version.
    """
    schema, data = saved.get(KEY, 0), {name: value for name, value in saved.items() if name != KEY}
    if not isinstance(schema, int) or schema > SCHEMA:
        text = f"the run was written by a newer version (spec schema {schema}; this version reads up to {SCHEMA})"
        raise EnvironmentProblem(f"{text}; install that version: see its manifest.json")
    note = ""
    for step in range(schema, SCHEMA):
        table = read_table(__file__, TABLE.name)[step]
        data, renamed, gone = _next_schema(data, table)
        note += f"; {renamed} options have another name now" if renamed else ""
        note += f"; without effect now: {', '.join(gone)}" if gone else ""
        inexact = [why for choice, why in table["inexact"].items() if _is_chosen(choice, data)]
        note += "".join(f"; {why}" for why in inexact)
    return SavedSpec(data, f"an older version wrote this run{note}" if note else "")


def _next_schema(data: Mapping[str, Any], table: Mapping[str, Any]) -> tuple[dict[str, Any], int, list[str]]:
    """The spec one schema later, how many options were renamed, and those that are gone."""
    renamed, gone = 0, list[str]()
    sections = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for group, section in data.items():
        known = _options(group, section)
        for option, value in section.items() if isinstance(section, Mapping) and known else ():
            key = f"{group}.{option}"
            if key in table["reused"] and table["reused"][key].partition(".")[2] not in section:
                successors: dict[str, Any] | None = {table["reused"][key]: value}
            elif option in known:
                continue
            elif key in table["renamed"]:
                successors = {table["renamed"][key]: value}
            elif key in table["dropped"]:
                successors = {}
            else:
                successors = migrate.table().successors(key, value)
            if successors is None:
                continue
            del sections[group][option]
            for name, translated in successors.items():
                other, _, leaf = name.partition(".")
                sections.setdefault(other, {})[leaf] = translated
            renamed += bool(successors)
            gone += [] if successors else [f"{key}={migrate.format_value(value)}"]
    for key, value in table["assumed"].items():
        group, _, option = key.partition(".")
        if group in sections:
            sections[group].setdefault(option, value)
    return sections, renamed, gone


def _is_chosen(choice: str, data: Mapping[str, Any]) -> bool:
    group, _, name = choice.partition("=")
    section = data.get(group)
    return isinstance(section, Mapping) and section.get("name") == name


def options_of_group(group: str) -> frozenset[str]:
    """The options that any component of a group has, or a section; empty for another name."""
    classes: list[Any] = [*default_registry().classes(group).values()]
    if group in JobSpec.model_fields:
        classes.append(JobSpec.model_fields[group].annotation)
    configs = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, Config)]
    return frozenset(name for cls in configs for name in cls.model_fields)


def reused_options() -> dict[str, str]:
    """Options whose name means something else than in an older version, and those with the old meaning."""
    return {old: new for table in read_table(__file__, TABLE.name).values() for old, new in table["reused"].items()}


def _options(group: str, section: Any) -> frozenset[str]:
    """The options of a group's component, or of a section; empty for an unknown one."""
    name = section.get("name") if isinstance(section, Mapping) else None
    cls: Any = default_registry().classes(group).get(str(name))
    if cls is None and group in JobSpec.model_fields:
        cls = JobSpec.model_fields[group].annotation
    return frozenset(cls.model_fields) if isinstance(cls, type) and issubclass(cls, Config) else frozenset()
