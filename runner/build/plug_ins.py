"""Which code of plug-ins a job uses, by digest: a resumed run says where it changed."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from runner.algorithm.loss_registry import choices, functions
from runner.reward.config import RewardConfig
from runner.spec.base import ComponentConfig
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry


def plug_in_digests(spec: JobSpec) -> dict[str, str]:
    """`plug-in NAME` → digest, of each package that has a component or a loss of the job."""
    packages = {module.partition(".")[0] for config in _components(spec) for module in _modules(config)}
    return {f"plug-in {name}": _digest(name) for name in sorted(packages - {"runner"})}


def _components(spec: JobSpec) -> Iterator[ComponentConfig]:
    """Every component of a job, those of sums and of evaluation sets included."""
    parts = [{group: getattr(spec, group) for group in default_registry().groups() if hasattr(spec, group)}]
    parts += [dict(one.components) for one in spec.evaluation.decoded_sets()]
    for one in parts:
        reward = one.pop("reward", None)
        yield from () if reward is None else cast(RewardConfig, reward).components()
        yield from (config for group, config in one.items() if group != "callbacks")
    yield from spec.callbacks.by_name.values()


def _modules(config: ComponentConfig) -> Iterator[str]:
    """The modules of a component's config class, of its factory and of the losses that it names."""
    yield type(config).__module__
    yield type(config).factory.partition(":")[0]
    for choice, kind in choices(type(config)).items():
        if (chosen := functions(kind).get(getattr(config, choice))) is not None:
            yield chosen.function.__module__


def _digest(package: str) -> str:
    """Of the Python files of a package or of a module."""
    module = importlib.import_module(package)
    roots = [Path(place) for place in getattr(module, "__path__", ())]
    files = [(root, file) for root in roots for file in sorted(root.rglob("*.py"))]
    if not roots and (origin := getattr(module, "__file__", None)) is not None:  # none of a program in standard input
        files = [(Path(origin).parent, Path(origin))]
    found = hashlib.sha256()
    for root, file in files:
        found.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:16]
