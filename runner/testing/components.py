"""What all checks share: config, factory and a tiny model; checks of callbacks and trackers."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import torch

from runner.build.result_check import CHECKS, check_result
from runner.core.auto_choices import Decisions
from runner.interfaces import Callback, GenerativeModel, RunFolder, StepResult, Tracker
from runner.model.config import TinyConfig
from runner.spec.base import CallbackConfig, ComponentConfig
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry, resolve
from runner.tracker.config import TrackerConfig
from runner.tracker.console import Console
from runner.tracker.jsonl import JsonlTracker

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
    """What the component's factory makes of its config, with the checks of a job."""
    made = default_registry().factory(config)(config, *parts, **context)
    return check_result(config, made, *parts, **context) if config.group in CHECKS else made


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


SECRET = "planted-secret-5f1c2e"


def check_callback(config: CallbackConfig, *, steps: int = 4, values: Mapping[str, float] | None = None) -> Callback:
    """Check that a run with the callback and one that is interrupted and resumed end in the same state.

    Returns the callback of the first run.

    values: the numbers that each step has
    """
    check_config(config)
    require(steps > 1, "a run that can be interrupted has two steps or more")
    with tempfile.TemporaryDirectory() as folder:
        whole, before, after = (_callback(config, Path(folder) / name) for name in ("whole", "part", "part"))
        given = dict(values or {"train/loss": 1.0})
        _run(whole, 0, steps, steps, given)
        _run(before, 0, steps // 2, steps, given)
        state = before.state_dict()
        again = as_checkpointed(state, allow_nan=False)
        changed = [name for name in again if name != "tensors" and again[name] != state[name]]
        require(not changed, f"state_dict() is another one after JSON: {changed} of {state} became {again}")
        after.load_state_dict(again)
        _run(after, steps // 2, steps, steps, given)
        one, other = whole.state_dict(), after.state_dict()
        require(repr(one) == repr(other), f"after a resume the state is {other!r}, and without one {one!r}")
    return whole


def _callback(config: CallbackConfig, root: Path) -> Callback:
    root.mkdir(exist_ok=True)
    context = {"folder": RunFolder(root), "model": build_tiny_model(), "decide": Decisions()}
    callback: Callback = build_component(config, **context, say=list[str]().append, is_rank0=True)
    return callback


def _run(callback: Callback, first: int, last: int, steps: int, values: Mapping[str, float]) -> None:
    """What the loop calls from step `first` to `last`; `on_end` only where all `steps` are done."""
    callback.on_start(first)
    for step in range(first, last):
        end = StepResult(step + 1, dict(values), last=step + 1 == steps)
        callback.on_step(end)
        gone = values.keys() - end.values.keys()
        require(not gone, f"on_step() may add numbers to `values`, and took away {sorted(gone)}")
        odd = {name: value for name, value in end.values.items() if type(value) is not float}
        require(not odd, f"on_step() adds numbers of type float; got {odd}")
    if last == steps:
        callback.on_end()


def as_checkpointed(state: Mapping[str, Any], *, allow_nan: bool = True) -> dict[str, Any]:
    """The state as a checkpoint gives it back: copies of its tensors, all else through JSON.

    Raises AssertionError for what a checkpoint cannot hold.
    """
    plain = {name: value for name, value in state.items() if name != "tensors"}
    try:
        again: dict[str, Any] = json.loads(json.dumps(plain, allow_nan=allow_nan))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state_dict() holds JSON values, and tensors under 'tensors' only: {error}") from error
    tensors = {name: tensor.clone() for name, tensor in state.get("tensors", {}).items()}
    return again | ({"tensors": tensors} if tensors else {})


def check_tracker(config: TrackerConfig) -> list[str]:
    """Check that the tracker takes numbers (also NaN) and samples, resumes, and writes no secret.

    Returns what it says at the end.
    """
    check_config(config)
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root).resolve() / "outputs" / "run")
        folder.root.mkdir(parents=True)
        lines = _track(config, folder, first=0)
        lines += _track(config, folder, first=2)
        files = filter(Path.is_file, folder.root.rglob("*"))
        found = ", ".join(path.name for path in files if SECRET.encode() in path.read_bytes())
        require(not found, f"a secret of the spec is in {found}; take `redact_values` from runner.interfaces")
    return lines


def _track(config: TrackerConfig, folder: RunFolder, first: int) -> list[str]:
    """Two steps of a run."""
    console = Console(folder.log, io.StringIO())
    spec = {"name": "check", "seed": 0, "tracker": config.model_dump(mode="json"), "api": {"token": SECRET}}
    context = {"run_id": "check", "name": "check", "first_step": first, "console": console, "decide": Decisions()}
    journal = JsonlTracker(folder)
    tracker: Tracker = build_component(config, folder=folder, spec=spec, **context)
    rows = [{"prompt": "a", "answer": "b", "reward": None}]
    for step, loss in ((first + 1, 1.0), (first + 2, math.nan)):
        for sink in (journal, tracker):
            sink.log(step, {"train/loss": loss, "reward/mean": 0.5})
            sink.log_samples(step, rows)
    journal.finish("done")
    said = tracker.finish("done")
    fits = isinstance(said, list) and all(isinstance(line, str) for line in said)
    require(fits, f"finish() returns the lines to print at the end; got {said!r}")
    return said
