"""Runs a job in this process: starts it in a new folder, or goes on in an old one."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.errors import Problem, SpecError
from runner.folder import RunFolder, claim, create, locked, point_latest, shown
from runner.identity import frozen
from runner.launch import torchrun
from runner.launch.attempt import is_other_machine, join
from runner.launch.base import StartedConfig
from runner.launch.preflight import check_model
from runner.launch.records import keep_evidence, write_yaml
from runner.launch.slurm import submission, task
from runner.launch.stages import TRUSTED, with_first_weights, with_other_models
from runner.registry import default_registry
from runner.schedule.config import DecayConfig
from runner.spec.job import JobSpec
from runner.spec.origin import COMMAND_LINE

log = logging.getLogger("runner")


def start(spec: JobSpec, typed: Sequence[str], origins: Mapping[str, str], where: Path | None = None) -> int:
    """Run a new job. The run folder, spec.yaml and `latest` exist before torch is imported.

    where: the run's folder, which `latest` then does not follow; None = a new one below outputs/
    """
    torchrun.refuse_misfit(spec)
    typed_job = spec.model_dump(mode="json")
    if is_other_machine(spec):
        return join(spec, typed_job)
    if later := task.is_outside(spec):
        spec = checked(spec)
        submission.try_out(spec)
    else:
        spec = ready(spec)
    folder = create(spec.name) if where is None else claim(where)
    with locked(folder):
        write_spec(folder, spec)
        if spec.launch.name == task.NAME and not later:
            task.remember(folder)
        write_yaml(folder.overrides, {"typed": list(typed), "set_by": dict(origins)})
        if where is None:
            point_latest(folder)
        if not later:
            return begin(spec, folder, 1, typed_job)
        submission.put_off(folder)
    return submission.submit(spec, folder, [word for word in typed if word.lstrip("+") == TRUSTED])


def begin(spec: JobSpec, folder: RunFolder, attempt: int, typed: Mapping[str, Any]) -> int:
    """Make an attempt as `launch` says; see `launch.attempt`."""
    return int(default_registry().factory(spec.launch)(spec, folder, attempt, typed))


def ready(spec: JobSpec) -> JobSpec:
    """The spec with absolute paths, and weights that are there; everything is checked that needs no torch.

    Raises SpecError, DataError, EnvironmentProblem, or what a recipe that is run first ends with.
    """
    if spec.launch.here:
        spec.device.preflight()
        spec.sampler.preflight_here()
        spec.optimizer.preflight()
    return with_other_models(with_first_weights(checked(spec)))


def checked(spec: JobSpec) -> JobSpec:
    """The spec with absolute paths, if nothing is wrong that any machine can see. Raises SpecError, DataError,
    EnvironmentProblem."""
    local = {name: getattr(spec, name).absolute() for name in ("data", "model", "algorithm", "reward")}
    spec = spec.model_copy(update=local)
    check_model(spec)
    spec.launch.preflight()
    spec.data.preflight(spec.algorithm.items)
    spec.reward.preflight()
    spec.sampler.preflight()
    spec.parallelism.preflight()
    return spec


def resume(folder: RunFolder, before: JobSpec, spec: JobSpec, typed: Sequence[str] = ()) -> int:
    """Go on where the run stopped; `spec` is `before` with overrides. A finished run says so and is left alone."""
    refuse_other_job(before, spec)
    if status(folder).get("state") == "done" and spec.steps <= before.steps:
        more = f"run resume {shown(folder.root)} steps={before.steps * 2}"
        refuse_idle(before, as_written(spec), more)
        print(f"{shown(folder.root)}: finished after {before.steps} steps; to go on: {more}")
        return 0
    torchrun.refuse_misfit(spec)
    typed_job = spec.model_dump(mode="json")
    if is_other_machine(spec):
        return join(spec, typed_job)
    if task.is_outside(spec):
        submission.refuse_alive(folder)
        submission.try_out(spec)
        return submission.submit(spec, folder, typed)
    if status(folder).get("state") == submission.WAITING:
        return _begin_late(folder, spec, typed_job)
    if spec.launch.here:
        spec.device.preflight()
    _say_stretched(before, spec)
    with locked(folder):
        attempt = next_attempt(folder)
        keep_evidence(folder, attempt, typed)
        if spec != before:
            write_spec(folder, spec)
        return begin(spec, folder, attempt, typed_job)


def _begin_late(folder: RunFolder, spec: JobSpec, typed: Mapping[str, Any]) -> int:
    """Begin a run that was submitted, where it runs."""
    with locked(folder):
        spec = ready(spec)
        write_spec(folder, spec)
        return begin(spec, folder, 1, typed)


def _say_stretched(before: JobSpec, spec: JobSpec) -> None:
    """A falling schedule falls towards the end of the run: with more steps the curve is not that of one longer run."""
    if spec.steps != before.steps and isinstance(spec.schedule, DecayConfig):
        moved = f"schedule={spec.schedule.name} now ends at step {spec.steps} and not {before.steps}"
        print(f"note: {moved}: the learning rate rises again, unlike in one run of that length", file=sys.stderr)


def write_spec(folder: RunFolder, spec: JobSpec) -> None:
    """Write spec.yaml: every value filled in, fit for `run --spec`."""
    write_yaml(
        folder.spec,
        as_written(spec).model_dump(mode="json"),
        head=f"# The resolved job spec. Run it again: run --spec {shown(folder.spec)}\n",
    )


def as_written(spec: JobSpec) -> JobSpec:
    """The spec without what its processes are told anew whenever they are started."""
    if not isinstance(spec.launch, StartedConfig):
        return spec
    launch = spec.launch.model_copy(update={"node": None, "address": None})
    return spec.model_copy(update={"launch": launch})


def refuse_other_job(before: JobSpec, spec: JobSpec) -> None:
    """Raise SpecError naming every override that would make this another run."""
    if spec.steps < before.steps:
        message = f"{spec.steps} is below the run's {before.steps}; a run can only get longer"
        raise SpecError([Problem("steps", message, COMMAND_LINE)])
    began, now = frozen(before), frozen(spec)
    problems = [
        Problem(name, "was fixed when the run began; start a new run to change it", COMMAND_LINE)
        for name in now
        if began[name] != now[name]
    ]
    if problems:
        raise SpecError(problems)


def refuse_idle(before: JobSpec, spec: JobSpec, more: str) -> None:
    """Raise SpecError naming every override of a finished run that no step would see."""
    problems = [
        Problem(name, f"the run is finished, so this changes nothing; with more steps it does: {more}", COMMAND_LINE)
        for name in _changed(before, spec)
    ]
    if problems:
        raise SpecError(problems)


def status(folder: RunFolder) -> dict[str, object]:
    """status.json; empty where there is none, or none that can be read: the checkpoints tell how far a run is."""
    try:
        return dict(json.loads(folder.status.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s); the checkpoints tell how far the run is", shown(folder.status), error)
        return {}


def next_attempt(folder: RunFolder) -> int:
    """One more than the last attempt that left a trace: status.json may be lost."""
    last = status(folder).get("attempt")
    kept = [int(path.name) for path in folder.attempts.glob("*") if path.name.isdecimal()]
    return max([1, *kept, *([last] if isinstance(last, int) else [])]) + 1


def _changed(before: JobSpec, spec: JobSpec) -> list[str]:
    return [name for name in type(spec).model_fields if getattr(before, name) != getattr(spec, name)]
