"""What all checks share: the config of a component, its factory, and a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any, get_args, get_origin

import torch

from runner.core.auto_choices import Decisions
from runner.interfaces import GenerativeModel
from runner.model.config import TinyConfig
from runner.spec.base import ComponentConfig
from runner.spec.job import JobSpec
from runner.spec.registry import resolve

HEAVY = ("torch", "transformers", "datasets", "peft", "numpy", "wandb")
SMALL = TinyConfig(hidden_size=32, intermediate_size=48, layers=2, kv_heads=2, dtype="float32")
CPU = torch.device("cpu")


def require(condition: bool, text: str) -> None:
    """Raise AssertionError, also where Python runs without assertions."""
    if not condition:
        raise AssertionError(text)


def check_config(config: ComponentConfig) -> None:
    """Check that options are described, strict and readable without torch, and that the factory imports."""
    cls = type(config)
    group, name = getattr(cls, "group", None), cls.component_name()
    require(group in JobSpec.model_fields, f"{cls.__name__}.group is {group!r}; take a base class from runner.spec")
    options = cls.model_fields
    literal = options["name"].annotation
    fixed = get_origin(literal) is not None and get_args(literal) == (name,)
    require(fixed, f'{cls.__name__}.name must name the component: name: Literal["{name}"] = "{name}"')
    require(bool((cls.__doc__ or "").strip()), f"{cls.__name__} needs a docstring: `run list {group}` shows it")
    bare = [option for option, info in options.items() if option != "name" and not info.description]
    require(not bare, f"{cls.__name__}: no description of {', '.join(bare)}; write Field(description=…)")
    again = cls.model_validate(config.model_dump(mode="json"))
    kept = again.model_dump(mode="json") == config.model_dump(mode="json")
    require(kept, f"{cls.__name__} is another one after spec.yaml: {config!r} became {again!r}")
    heavy = _heavy_imports(cls.__module__)
    require(not heavy, f"{cls.__module__} imports {heavy}; every command reads it, so the factory's module imports it")
    require(callable(_factory(cls)), f"{cls.__name__}.factory: {cls.factory} is not a function")


def _factory(cls: type[ComponentConfig]) -> Any:
    """What the class names as its factory. Raises AssertionError where that is not there."""
    try:
        return resolve(cls.factory)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{cls.__name__}.factory names {cls.factory}, which is not there: {error}") from error


def build_component(config: ComponentConfig, *parts: Any, **context: Any) -> Any:
    """What the component's factory makes of its config."""
    return resolve(type(config).factory)(config, *parts, **context)


@cache
def tiny_tokenizer() -> Any:
    """The tiny model's tokenizer, whose tokens are bytes."""
    return resolve(TinyConfig.tokenizer_factory)(SMALL)


def build_tiny_model(seed: int = 0) -> GenerativeModel:
    """A model of two layers with random weights, on the CPU."""
    model: GenerativeModel = build_component(
        SMALL, tokenizer=tiny_tokenizer(), device=CPU, seed=seed, decide=Decisions()
    )
    return model


@cache
def _heavy_imports(module: str) -> str:
    """The packages that take seconds to import, of those that a module imports."""
    if module == "__main__":
        return ""
    program = (
        f"import importlib, sys; importlib.import_module({module!r}); "
        f"print(', '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    require(found.returncode == 0, f"{module} cannot be imported by itself:\n{found.stderr}")
    return found.stdout.strip()
