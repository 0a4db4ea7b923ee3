"""Generates conf/<group>/<name>.yaml and the recipes' editor schema from the config classes.

python -m runner.cli.conf --write | --check             # the shipped files
python -m runner.cli.conf --write | --check PACKAGE     # the files of an installed plug-in's components
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from runner.cli.config_sources import (
    hydra_session,
    plain_default,
)
from runner.cli.hydra_compose import group_options
from runner.core.package import conf_dir, recipes_dir
from runner.spec.base import ComponentConfig
from runner.spec.registry import Registry, built_in_registry, default_registry
from runner.spec.schema import groups_of, model_schema, recipe_schema
from runner.spec.suggest import expected_type
from runner.sweep.config import SweepConfig
from runner.tracker.text import print_text

SCHEMA = ".schema.json"
BESIDE: dict[str, type[BaseModel]] = {"sweep": SweepConfig}  # sections of a recipe that are no part of a job


def component_file(cls: type[ComponentConfig]) -> str:
    """The YAML of a component: every option with its default, below its description and its range."""
    about = " ".join((cls.__doc__ or "").split())
    lines = [f"# {about}", f"name: {cls.component_name()}"]
    for name, info in cls.model_fields.items():
        if name == "name":
            continue
        default = "???" if info.is_required() else scalar(plain_default(info.get_default(call_default_factory=True)))
        lines += [f"# {info.description}  [{expected_type(model_schema(cls)[name])}]", f"{name}: {default}"]
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """A value on one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def files(package: str = "runner") -> Iterator[tuple[Path, str]]:
    """(path, content) of everything that is generated for the components of an importable package."""
    own = built_in_registry() if package == "runner" else default_registry()
    conf = conf_dir() if package == "runner" else Path(str(files_of(package)), "conf")
    for group in groups_of(own):
        for name, cls in own.classes(group).items():
            if cls.__module__.partition(".")[0] == package:
                yield conf / group / f"{name}.yaml", component_file(cls)
    if package == "runner":
        shipped = {group: sorted(path.stem for path in (conf / group).glob("*.yaml")) for group in groups_of(own)}
        yield recipes_dir() / SCHEMA, json.dumps(recipe_schema(shipped, BESIDE, own), indent=1) + "\n"


def choices(registry: Registry) -> dict[str, list[str]]:
    """What can be chosen for each group here and now."""
    with hydra_session(registry) as loader:
        return {group: group_options(loader.get_sources(), group) for group in groups_of(registry)}


def main(argv: Sequence[str]) -> int:
    """Write the files, or say which are out of date."""
    mode, *package = argv or [""]
    if mode not in ("--write", "--check") or len(package) > 1:
        print("usage: python -m runner.cli.conf --write | --check [PACKAGE]", file=sys.stderr)
        return 2
    stale = [(p, t) for p, t in files(*package) if not p.is_file() or p.read_text(encoding="utf-8") != t]
    for path, text in stale:
        print_text(f"{path}: {'written' if mode == '--write' else 'differs from its schema'}")
        if mode == "--write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if stale and mode == "--check" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
