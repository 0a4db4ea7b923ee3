"""Reads YAML that users write, by the rules of YAML 1.2: `8:00:00`, `on`, `no` and `010` are text.

PyYAML follows YAML 1.1, which reads them as 28800, true, false and 8. Numbers are those of OmegaConf: 1e-4 is one. Text
where an option expects a number or true or false is an error of the option.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from runner.core.untrusted_text import check_yaml

TAG = "tag:yaml.org,2002:"
# value → its form in YAML 1.2, for the types that YAML 1.1 finds in more values; a float keeps OmegaConf's form too
FORMS = {
    f"{TAG}bool": re.compile("true|True|TRUE|false|False|FALSE"),
    f"{TAG}int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+"),
    f"{TAG}float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}


@cache
def _loader() -> Any:
    """OmegaConf's loader, which refuses a key that is written twice, with the types of YAML 1.2."""

    class Loader(get_yaml_loader()):  # type: ignore[misc]
        def resolve(self, kind: type, value: str, implicit: tuple[bool, bool]) -> str:
            tag = str(super().resolve(kind, value, implicit))
            if kind is yaml.ScalarNode and implicit[0] and tag in FORMS and not FORMS[tag].fullmatch(value):
                return f"{TAG}str"
            return tag

    return Loader


def _loader_of(text: str, name: str) -> Any:
    check_yaml(text)
    loader = _loader()(text)
    loader.name = name
    return loader


def compose_yaml(text: str, name: str = "") -> yaml.Node | None:
    """The nodes of a YAML text, which know their places in it. Raises ValueError, yaml.YAMLError."""
    loader = _loader_of(text, name)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


def load_yaml(text: str, name: str = "") -> DictConfig | ListConfig:
    """The content of a YAML text; name: of its file, for errors. Raises ValueError, yaml.YAMLError."""
    loader = _loader_of(text, name)
    try:
        content = loader.get_single_data()
    finally:
        loader.dispose()
    if not isinstance(content, dict | list | None):
        raise ValueError(f"expected options, e.g. steps: 100; got {content!r:.80}")
    found: DictConfig | ListConfig = OmegaConf.create({} if content is None else content)
    return found
