"""Runs a job in this process: starts it in a new folder, or goes on in an old one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import yaml

from runner.errors import Problem, SpecError
from runner.folder import RunFolder, create, locked, point_latest, shown, write_atomic
from runner.launch.session import Session
from runner.spec.job import JobSpec

# What may change when a run goes on: how long, how it is watched and kept; nothing that the curve so far depends on.
RESUMABLE = ("steps", "strict", "evaluation", "watch", "tracker", "checkpoint")


def start(spec: JobSpec, typed: Sequence[str], origins: Mapping[str, str]) -> int:
    """Run a new job. The run folder, spec.yaml and `latest` exist before torch is imported."""
    spec.device.preflight()
    spec = spec.model_copy(update={"data": spec.data.absolute(), "model": spec.model.absolute()})
    spec.data.preflight()
    folder = create(spec.name)
    with locked(folder):
        write_spec(folder, spec)
        provenance = {"typed": list(typed), "set_by": dict(origins)}
        write_atomic(folder.overrides, yaml.safe_dump(provenance, sort_keys=False, allow_unicode=True))
        point_latest(folder)
        return Session(spec, folder, attempt=1).run()


def resume(folder: RunFolder, before: JobSpec, spec: JobSpec) -> int:
    """Go on where the run stopped; `spec` is `before` with overrides. A finished run says so and is left alone."""
    refuse_other_job(before, spec)
    if _finished(folder) and spec.steps <= before.steps:
        more = f"to go on: run resume {shown(folder.root)} steps={before.steps * 2}"
        print(f"{shown(folder.root)}: finished after {before.steps} steps; {more}")
        return 0
    spec.device.preflight()
    with locked(folder):
        attempt = _attempts(folder) + 1
        if spec != before:
            kept = folder.attempts / str(attempt)
            kept.mkdir(parents=True, exist_ok=True)
            write_atomic(kept / "spec.yaml", folder.spec.read_text(encoding="utf-8"))
            write_spec(folder, spec)
        return Session(spec, folder, attempt).run()


def write_spec(folder: RunFolder, spec: JobSpec) -> None:
    """Write spec.yaml: every value filled in, fit for `run --spec`."""
    head = f"# The resolved job spec. Run it again: run --spec {shown(folder.spec)}\n"
    write_atomic(folder.spec, head + yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def refuse_other_job(before: JobSpec, spec: JobSpec) -> None:
    """Raise SpecError naming every override that would make this another run."""
    if spec.steps < before.steps:
        raise SpecError(
            [
                Problem(
                    "steps",
                    f"{spec.steps} is below the run's {before.steps}; a run can only get longer",
                    "command line",
                )
            ]
        )
    changed = [name for name in type(spec).model_fields if getattr(before, name) != getattr(spec, name)]
    problems = [
        Problem(name, "was fixed when the run began; start a new run to change it", "command line")
        for name in changed
        if name not in RESUMABLE
    ]
    if problems:
        raise SpecError(problems)


def _status(folder: RunFolder) -> dict[str, object]:
    return dict(json.loads(folder.status.read_text(encoding="utf-8"))) if folder.status.exists() else {}


def _finished(folder: RunFolder) -> bool:
    return _status(folder).get("state") == "done"


def _attempts(folder: RunFolder) -> int:
    return int(str(_status(folder).get("attempt", 1)))
