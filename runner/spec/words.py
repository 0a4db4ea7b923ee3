"""Words for a schema: what a field expects, what it got, and pydantic's errors as sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from runner.spec.suggest import ABSENT, nearest

TYPES = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true/false values"),
    "string": ("a text", "texts"),
    "null": ("null", "nulls"),
    "object": ("a section", "sections"),
}


PATTERNS = {  # in words, where a newcomer meets them
    r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}$": "of at most 80 letters, digits, '.', '_' and '-'"
}
SAME = {"bf16": "bfloat16", "fp32": "float32"}  # what people call a choice


def expectation(schema: Mapping[str, Any]) -> str:
    """What a field takes, from its JSON Schema: `a number above 0 or null`."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(expectation(option) for option in schema["anyOf"]))
    if "const" in schema:
        return f"'{schema['const']}'"
    if "enum" in schema:
        return "one of " + ", ".join(shown(v, bare=True) for v in schema["enum"])
    if schema.get("type") == "array":
        return _list(schema)
    return " ".join(filter(None, (TYPES.get(str(schema.get("type")), ("a section", ""))[0], limits(schema))))


def span(schema: Mapping[str, Any]) -> str:
    """The values a field takes within its type: `above 0`, `one of a, b`; empty if all."""
    if "anyOf" in schema:
        return "; ".join(filter(None, map(span, schema["anyOf"])))
    if "enum" in schema.get("items", {}):
        return expectation(schema).removeprefix("a list of ")
    return expectation(schema) if "enum" in schema or "const" in schema else limits(schema).removeprefix("that is ")


def limits(schema: Mapping[str, Any]) -> str:
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


def shown(value: Any, bare: bool = False) -> str:
    """A value as it would be typed: `'fast'`, `true`, `null`, `[1, 2]`."""
    if isinstance(value, str):
        return value if bare else f"'{value}'"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def complaint(schema: Mapping[str, Any], key: str, value: Any) -> str:
    """What was expected and what came instead, with the remedy for a number where text is wanted."""
    said = f"expected {expectation(schema)}, got {shown(value)}"
    few = [choice for s in schema.get("anyOf", [schema]) for choice in s.get("enum", ())]
    if isinstance(value, str) and (meant := SAME.get(value.lower())) in few:
        said += f"; did you mean '{meant}'?"
    elif isinstance(value, str) and few and (why := ABSENT.get(value.lower())) is not None:
        said += f"; {why}"
    elif isinstance(value, str) and (close := nearest(value, few)):
        said += f"; did you mean '{close}'?"
    kinds = schema.get("anyOf", [schema])
    wants_text = any(s.get("type") == "string" and not {"enum", "const"} & s.keys() for s in kinds)
    if wants_text and isinstance(value, int | float):
        said += f"; to give it as a text: '{key}=\"{shown(value)}\"'"
    return said


def _list(schema: Mapping[str, Any]) -> str:
    fixed = schema.get("prefixItems")
    items = fixed[0] if fixed else schema.get("items", {})
    choices = ", ".join(shown(choice, bare=True) for choice in items.get("enum", ()))
    kinds = f"some of {choices}" if choices else TYPES.get(str(items.get("type")), ("", "values"))[1]
    count = f"{len(fixed)} " if fixed else "one or more " if schema.get("minItems") == 1 else ""
    return f"a list of {count}{kinds}"
