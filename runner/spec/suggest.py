"""Words for a wrong key: what the user probably meant, what a field expects, and what it got.

The meaning is looked up in migrate.yaml, in other sections, and by spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

from runner.core.package import COMPONENTS_GROUP, LEFT_OUT

# (group, member) → its option names; a group "" holds the top level, and sections that are no group have one member "".
Options = Mapping[str, Mapping[str, Iterable[str]]]


@dataclass(frozen=True, slots=True)
class Job:
    """What is known of the job in which a word is typed."""

    chosen: Mapping[str, str] = field(default_factory=dict)  # group → its member
    data: Mapping[str, Any] = field(default_factory=dict)  # dotted key → value, of our options
    typed: Mapping[str, Any] = field(default_factory=dict)  # dotted key → value, of the keys that are no options


NO_JOB = Job()
NPU_SIMULATOR = "npu_sim"
_ON_RAY = "Ray chooses the nodes; leave it out: launch.devices counts the ranks on all nodes"
WRONG_MEMBER = {  # done otherwise
    ("launch", "ray", "nodes"): _ON_RAY,
    ("launch", "ray", "node"): _ON_RAY,
    ("launch", "ray", "folder"): "submit a job to a cluster with `ray job submit`, with --folder: docs/launch.md",
}

CLOSEST = 0.85  # a slip of one letter: an option of the component itself is meant, not another's of that very name


def nearest_word(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word closest in spelling, if any is close."""
    by_lower = {k.lower(): k for k in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'adamw'?`, empty if no known word is close in spelling."""
    close = nearest_word(word, known)
    return f"; did you mean '{close}'?" if close else ""


def absence_reason(group: str, wrong: str) -> str | None:
    """Why there is no such member of `group`, and what to type instead, if that is known."""
    from runner.spec import migrate

    if group == "device" and re.fullmatch(r"[a-z_]+:\d+", wrong.lower()):
        return migrate.answer("device.id", None, NO_JOB, {})
    if group == "launch" and (number := re.fullmatch(r"local_?(\d+)", wrong.lower())):
        return f"type launch.devices={number[1]}"
    if re.search(r"\.py\b", wrong):
        of_package, of_function = "docs/extend.md has a package of yours", f"type reward=function reward.path={wrong}"
        return f"a choice is a component, not a file; {of_function if group == 'reward' else of_package}"
    return migrate.table().absent.get(wrong.lower())


def suggest_name(group: str, wrong: str, known: Iterable[str]) -> str | None:
    """The member of `group` that `wrong` probably means."""
    from runner.spec import migrate

    known = list(known)
    other = migrate.table().choices.get(group, {}).get(wrong.lower())
    return other if other in known else nearest_word(wrong, known)


def unknown_name(group: str, name: Any, members: Iterable[str]) -> str:
    """`no device named 'gpu'; did you mean 'cuda'? (auto, cpu, cuda, npu)`."""
    known = ", ".join(sorted(members))
    kind = "callback" if group == "callbacks" else group
    said = f"no {kind} named {format_value(name)}"
    if (lost := LEFT_OUT.get((COMPONENTS_GROUP, str(name)))) is not None:
        return f"{said}; {lost}"
    if (why := absence_reason(group, str(name))) is not None:
        return f"{said} ({known}): {why}"
    meant = suggest_name(group, str(name), members)
    return said + (f"; did you mean '{meant}'?" if meant else "") + f" ({known})"


def suggest_key(section: str, chosen: str, wrong: str, options: Options, value: Any = None, job: Job = NO_JOB) -> str:
    """Advice on the unknown key `section.wrong`, e.g. `type optimizer.lr=1e-5`; empty if none is close.

    `chosen` is the section's chosen member; `options` lists every option there is; `value` (None: none was typed) and
    `job` are what another framework's word is answered with.
    """
    from runner.spec import migrate

    own = list(options.get(section, {}).get(chosen, ()))
    members = [member for member, names in options.get(section, {}).items() if member and wrong in set(names)]
    # Where another member has an option of that name, that one is meant.
    foreign = [_join(section, wrong), *([wrong, wrong.rpartition(".")[2]] if not members else [])]
    if said := next((said for word in foreign if (said := migrate.answer(word, value, job, options))), ""):
        return said
    if said := WRONG_MEMBER.get((section, chosen, wrong.lower()), ""):
        return said
    if why := migrate.table().absent.get(wrong.lower()):
        return why
    if members:
        return "an option of " + ", ".join(f"{section}={m}" for m in members)
    if close := nearest_word(wrong, own, cutoff=CLOSEST):
        return f"did you mean '{close}'?"
    others = {place: members.values() for place, members in options.items() if place != section}
    if places := [place for place, members in others.items() if any(wrong in set(names) for names in members)]:
        return "did you mean " + " or ".join(f"'{_join(p, wrong)}'" for p in places) + "?"
    if close := nearest_word(wrong, own):
        return f"did you mean '{close}'?"
    anywhere = {n: p for p, members in options.items() for names in members.values() for n in names}
    if close := nearest_word(wrong, anywhere, cutoff=CLOSEST):
        return f"did you mean '{_join(anywhere[close], close)}'?"
    return ""


def _join(place: str, leaf: str) -> str:
    return f"{place}.{leaf}" if place else leaf


TYPES = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true/false values"),
    "string": ("a text", "texts"),
    "null": ("null", "nulls"),
    "object": ("a section", "sections"),
}


# in words, where a newcomer meets them
PATTERNS = {r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}$": "of at most 80 letters, digits, '.', '_' and '-'"}
SAME = {"bf16": "bfloat16", "fp32": "float32", "int4": "nf4"}  # what people call a choice


def expected_type(schema: Mapping[str, Any]) -> str:
    """What a field takes, from its JSON Schema: `a number above 0 or null`."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(expected_type(option) for option in schema["anyOf"]))
    if "const" in schema:
        return f"'{schema['const']}'"
    if "enum" in schema:
        return "one of " + ", ".join(format_value(v, bare=True) for v in schema["enum"])
    if schema.get("type") == "array":
        return _list(schema)
    return " ".join(filter(None, (TYPES.get(str(schema.get("type")), ("a section", ""))[0], range_text(schema))))


def allowed_values(schema: Mapping[str, Any]) -> str:
    """The values a field takes within its type: `above 0`, `one of a, b`; empty if all."""
    if "anyOf" in schema:
        return "; ".join(filter(None, map(allowed_values, schema["anyOf"])))
    if "enum" in schema.get("items", {}):
        return expected_type(schema).removeprefix("a list of ")
    return (
        expected_type(schema) if "enum" in schema or "const" in schema else range_text(schema).removeprefix("that is ")
    )


def range_text(schema: Mapping[str, Any]) -> str:
    """The range of a field in words; empty if it has none."""
    low, high = schema.get("minimum"), schema.get("maximum")
    parts = [f"from {low} to {high}"] if low is not None and high is not None else []
    if not parts:
        parts += [f"at least {low}"] if low is not None else []
        parts += [f"above {schema['exclusiveMinimum']}"] if "exclusiveMinimum" in schema else []
        parts += [f"at most {high}"] if high is not None else []
    parts += [f"below {schema['exclusiveMaximum']}"] if "exclusiveMaximum" in schema else []
    parts += [f"a multiple of {schema['multipleOf']}"] if "multipleOf" in schema else []
    if "pattern" in schema:
        parts.append(PATTERNS.get(schema["pattern"], f"matching {schema['pattern']}"))
    parts += ["that is not empty"] if schema.get("minLength") == 1 else []
    return " and ".join(parts)


def format_value(value: Any, bare: bool = False) -> str:
    """A value as it would be typed: `'fast'`, `true`, `null`, `[1, 2]`."""
    if isinstance(value, str):
        return value if bare else f"'{value}'"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def value_complaint(schema: Mapping[str, Any], key: str, value: Any) -> str:
    """What was expected and what came instead, with the remedy for a number where text is wanted."""
    from runner.spec import migrate

    said = f"expected {expected_type(schema)}, got {format_value(value)}"
    few = [choice for s in schema.get("anyOf", [schema]) for choice in s.get("enum", ())]
    if isinstance(value, str) and (meant := SAME.get(value.lower())) in few:
        said += f"; did you mean '{meant}'?"
    elif isinstance(value, str) and few and (why := migrate.table().absent.get(value.lower())) is not None:
        said += f"; {why}"
    elif isinstance(value, str):
        said += did_you_mean(value, few)
    kinds = schema.get("anyOf", [schema])
    wants_text = any(s.get("type") == "string" and not {"enum", "const"} & s.keys() for s in kinds)
    if wants_text and isinstance(value, int | float):
        said += f"; to set it as text: '{key}=\"{format_value(value)}\"'"
    return said


def option_faults(
    error: ValidationError, cls: type[BaseModel], given: Mapping[str, Any], key: str, owner: str, others: Options
) -> Iterator[tuple[str, str]]:
    """The first fault of each option of a component inside a section, under its key.

    owner: whose options they are, e.g. reward=exact; others: the options of the components beside it
    """
    first = {str(e["loc"][0]): e["type"] for e in reversed(error.errors(include_url=False))}
    for name, kind in first.items():
        if name not in cls.model_fields:
            group, _, member = owner.partition("=")
            hint = suggest_key(group, member, name, others) if others else did_you_mean(name, cls.model_fields)[2:]
            yield f"{key}.{name}", f"not an option of {owner}" + (f"; {hint}" if hint else "")
        elif kind == "missing":
            yield f"{key}.{name}", f"must be given  ({cls.model_fields[name].description})"
        else:
            schema = cls.model_json_schema()["properties"][name]
            yield f"{key}.{name}", value_complaint(schema, name, given[name])


def _list(schema: Mapping[str, Any]) -> str:
    fixed = schema.get("prefixItems")
    items = fixed[0] if fixed else schema.get("items", {})
    choices = ", ".join(format_value(choice, bare=True) for choice in items.get("enum", ()))
    kinds = f"some of {choices}" if choices else TYPES.get(str(items.get("type")), ("", "values"))[1]
    count = f"{len(fixed)} " if fixed else "one or more " if schema.get("minItems") == 1 else ""
    return f"a list of {count}{kinds}"
