"""Records a job's first steps, or replays those of a recording; imports torch late.

spec ─▶ prepared ─▶ environment ─▶ torch ─▶ play ─▶ Recording
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.core.auto_choices import Decisions
from runner.core.errors import ParityError, Problem, SpecError
from runner.device.process_setup import load_torch, set_environment
from runner.launch.local import prepare_spec
from runner.launch.run_messages import console_logging
from runner.launch.session import translate_device_errors
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.tools.parity.compare import (
    compare,
    comparison_lines,
    disagreement_text,
    refuse_other_job,
    refuse_other_start,
)
from runner.tools.parity.recording import Recording, write


def record_steps(spec: JobSpec, steps: int, path: Path) -> Recording:
    """Run the first `steps` steps and write them to `path`.

    Raises StorageError, and SpecError for a job of several processes.
    """
    recording = _run_steps(_prepare(spec), steps, None, lambda start: None)
    write(path, recording)
    return recording


def compare_with(recorded: Recording, spec: JobSpec, tolerance: float, show: Callable[[Sequence[str]], None]) -> None:
    """Replay the recorded steps as `spec` says, and show both.

    Raises ParityError where they differ; SpecError, DataError or CheckpointError where they cannot be compared.
    """
    spec = _prepare(spec)
    refuse_other_job(recorded.spec, spec)
    here = _run_steps(spec, len(recorded.steps), recorded, lambda start: refuse_other_start(recorded, start))
    found = compare(recorded, here, sampled=spec.algorithm.needs_sampler)
    show(list(comparison_lines(found, recorded, here, tolerance)))
    if not found.agrees(tolerance):
        raise ParityError(disagreement_text(found, tolerance))


def _prepare(spec: JobSpec) -> JobSpec:
    """The job as it is run, without compiled layers; raises SpecError for what cannot be recorded."""
    if spec.launch.world > 1:
        text = f"run parity uses one process, but this job has {spec.launch.world}"
        raise SpecError([Problem("launch.devices", f"{text}; type launch.devices=1 launch.nodes=1 parallelism=single")])
    if spec.model.compile:
        text = "run parity hooks every module, but compiled layers have no modules inside; leave it out"
        raise SpecError([Problem("model.compile", text)])
    spec = prepare_spec(spec)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"compile": False})})


def _run_steps(spec: JobSpec, steps: int, given: Recording | None, accept: Callable[[Recording], None]) -> Recording:
    with TemporaryDirectory(prefix="run-parity-") as name, console_logging(Path(name) / "run.log") as console:
        decide = Decisions(spec.strict)
        set_environment(spec, decide)
        load_torch(spec.device.name)
        from runner.tools.parity.replay import run_recorded_steps  # torch is imported here

        with translate_device_errors(spec):
            return run_recorded_steps(spec, RunFolder(Path(name)), steps, given, accept, decide, console.message)
