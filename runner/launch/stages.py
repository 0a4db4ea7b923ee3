"""Where a job's first weights come from (`init_from`), or its teacher: a run, an export, a recipe that is run first.

recipe:NAME ──a run of its own, in a process of its own──▶ its export ─┐
a run's folder ──▶ its export ─────────────────────────────────────────┴──▶ an absolute folder
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from runner.errors import EnvironmentProblem, Interrupted, Problem, RunnerError, SpecError
from runner.folder import OUTPUTS, shown
from runner.launch.child import bound
from runner.launch.preflight import is_hub_id
from runner.launch.stage import environment, go_on
from runner.spec.job import JobSpec

RECIPE = "recipe:"
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model")


class StageFailed(RunnerError):
    """A recipe that was to be run first did not end well; its own message stands above."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def with_first_weights(spec: JobSpec) -> JobSpec:
    """The spec with `init_from` as an absolute folder of weights; a recipe is run now.

    Raises SpecError if there are no weights, Interrupted or StageFailed if the recipe did not end well.
    """
    if spec.init_from is None:
        return spec
    if spec.init_from.startswith(RECIPE):
        where = _run_first(spec, spec.init_from.removeprefix(RECIPE), "init_from", own_model=False)
    else:
        where = Path(spec.init_from).expanduser()
    return spec.model_copy(update={"init_from": str(_weights_of(where, "init_from"))})


def with_other_models(spec: JobSpec) -> JobSpec:
    """The spec with each other model that its algorithm names, a teacher, as an absolute folder or a hub id; a recipe
    is run now, on a model of its own.

    Raises SpecError if a folder has no weights, Interrupted or StageFailed if the recipe did not end well.
    """
    found = {option: _other_model(spec, option, path) for option, path in spec.algorithm.first_models().items()}
    return spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update=found)}) if found else spec


def _other_model(spec: JobSpec, option: str, path: str) -> str:
    """The absolute folder or hub id that `path`, which an option of the algorithm says, stands for."""
    key, revision = f"algorithm.{option}", f"{option}_revision"
    if path.startswith(RECIPE):
        where = _run_first(spec, path.removeprefix(RECIPE), key, own_model=True)
    elif is_hub_id(path) and "/" not in path:
        raise SpecError([Problem(key, f"{path}: no such folder; a hub id looks like ORG/NAME")])
    elif is_hub_id(path):
        print(f"{key}: no folder {path} here, so taken as a hub id", file=sys.stderr)
        return path
    else:
        where = Path(path).expanduser()
    if getattr(spec.algorithm, revision, None) is not None:
        raise SpecError([Problem(f"algorithm.{revision}", f"not used with {path}; it belongs to a hub id")])
    folder = _weights_of(where, key)
    if not any(found for pattern in TOKENIZERS for found in folder.glob(pattern)):
        text = f"{shown(folder)} has no tokenizer ({', '.join(TOKENIZERS)}); copy the one it was trained with there"
        raise SpecError([Problem(key, text)])
    return str(folder)


def _weights_of(where: Path, key: str) -> Path:
    """The folder with safetensors at `where`, or in its export."""
    for folder in (where / "export", where):
        if (folder / "adapter_config.json").exists():
            text = f"{shown(folder)} is an adapter; merge it into its base first: run export RUN --merge"
            raise SpecError([Problem(key, text)])
        if list(folder.glob("*.safetensors")):
            return folder.resolve()
    text = f"no weights in {shown(where)}; a finished run's folder, an export, or {RECIPE}NAME is expected"
    raise SpecError([Problem(key, text)])


def _run_first(spec: JobSpec, recipe: str, key: str, *, own_model: bool) -> Path:
    """Run the recipe that the option `key` names on this job's device, and on this job's model unless it has its own;
    returns its run folder."""
    name = f"{recipe[:30]}-{secrets.token_hex(4)}"
    what = "its own model" if own_model else "this job's model"
    print(f"{key}: running +recipe={recipe} first, on {what} (name={name})", file=sys.stderr, flush=True)
    words = [f"+recipe={recipe}", f"name={name}", f"seed={spec.seed}"]
    words += [f"device={spec.device.name}", *_options("device", spec.device.model_dump(mode="json"))]
    if not own_model:
        words += [f"model={spec.model.name}", *_options("model", spec.model.model_dump(mode="json"))]
    words += [f"tracker={spec.tracker.name}", *_options("tracker", spec.tracker.model_dump(mode="json"))]
    process = subprocess.Popen(bound([sys.executable, "-P", "-m", "runner", *words]), env=environment())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal interrupted both: the first run saves, then this one ends
        code = process.wait()
        code = code or 128 + signal.SIGINT
    if code in (130, 143):
        next_words = go_on(recipe, *_kept(spec, name, key))
        raise Interrupted(code - 128, f"while running +recipe={recipe} first; this job was not begun{next_words}")
    if code:
        raise StageFailed(f"+recipe={recipe}, which {key} asks for, ended with exit code {code}", code)
    found = sorted(OUTPUTS.glob(f"*/*-{name}-*"))
    if not found:
        raise EnvironmentProblem(f"+recipe={recipe} ended well, but left no run called {name} in {OUTPUTS}/")
    return found[-1]


def _kept(spec: JobSpec, name: str, key: str) -> tuple[Path | None, dict[str, str]]:
    """The folder of the interrupted stage called `name`, if it has a checkpoint, and what its job then starts from."""
    run = next((place.parent for place in OUTPUTS.glob(f"*/*-{name}-*/checkpoints")), None)
    before = {"init_from": shown(Path(spec.init_from))} if spec.init_from and key != "init_from" else {}
    return run, before if run is None else before | {key: shown(run)}


def _options(group: str, values: dict[str, object]) -> list[str]:
    """A component's options as overrides."""
    flow = {k: yaml.safe_dump(v, default_flow_style=True, width=10**6) for k, v in values.items() if k != "name"}
    return [f"{group}.{key}={text.removesuffix(chr(10)).removesuffix('...').strip()}" for key, text in flow.items()]
