"""Bounded parsing of JSON and YAML from outside: deep nesting and alias growth end with ValueError.

Nothing here imports PyYAML before a text needs it.
"""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100  # mappings and lists inside one another, in YAML
MOST_NODES = 100_000  # of a YAML text that is written out without aliases


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError where it is none, or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_yaml(text: str) -> None:
    """Raise ValueError where a YAML text is nested too deeply, or too large once aliases are expanded.

    A text that is no YAML passes: whoever parses it names the place.
    """
    if "*" not in text and sum(map(text.count, "[{-:")) < DEEPEST:
        return
    import yaml

    sizes: dict[str, int] = {}  # of each anchor's node, without aliases
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, values before it)
    total = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
                total += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor is not None:
                    sizes[anchor] = total - before
            elif isinstance(event, yaml.AliasEvent):
                total += sizes.get(event.anchor or "", 1)
            elif isinstance(event, yaml.ScalarEvent):
                total += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            line = event.start_mark.line + 1 if event.start_mark is not None else 0
            if len(open_nodes) > DEEPEST:
                raise ValueError(f"line {line}: nested more than {DEEPEST} levels deep")
            if total > MOST_NODES:
                raise ValueError(f"line {line}: more than {MOST_NODES} values, aliases counted in")
    except yaml.YAMLError:
        return
