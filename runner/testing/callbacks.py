"""Checks of callbacks and trackers."""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.core.auto_choices import Decisions
from runner.interfaces import Callback, RunFolder, StepResult, Tracker
from runner.testing.components import build_component, build_tiny_model, check_config, require
from runner.tracker.config import TrackerConfig
from runner.tracker.console import Console
from runner.tracker.jsonl import JsonlTracker
from runner.trainer.config import CallbackConfig

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
        after.load_state_dict(_through_checkpoint(before.state_dict()))
        _run(after, steps // 2, steps, steps, given)
        one, other = whole.state_dict(), after.state_dict()
        require(repr(one) == repr(other), f"after a resume the state is {other!r}, and without one {one!r}")
    return whole


def _callback(config: CallbackConfig, root: Path) -> Callback:
    root.mkdir(exist_ok=True)
    said: list[str] = []
    context = {"folder": RunFolder(root), "model": build_tiny_model(), "decide": Decisions()}
    callback: Callback = build_component(config, **context, say=said.append, is_rank0=True)
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


def _through_checkpoint(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint gives it back: tensors as they are, all else through JSON."""
    tensors = {"tensors": state["tensors"]} if "tensors" in state else {}
    plain = {name: value for name, value in state.items() if name != "tensors"}
    try:
        again: dict[str, Any] = json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state_dict() holds JSON values, and tensors under 'tensors' only: {error}") from error
    require(again == plain, f"state_dict() is another one after JSON: {plain} became {again}")
    return again | tensors


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
        found = [
            path.name for path in folder.root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
        ]
        files = ", ".join(found)
        require(not found, f"a secret of the spec is in {files}; take `redact_values` from runner.interfaces")
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
