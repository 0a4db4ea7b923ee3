"""What an attempt leaves in the run's folder, of which rank 0 writes all.

status_of(folder)      the process that was started: running ─▶ done | interrupted | failed, then report.html
archive_attempt(folder) the same, before another attempt: attempts/N/, what that one will write again
RunRecords             rank 0: manifest, metrics, samples, trackers, what a resume cuts away
NullRecords            another rank: nothing; it has a log of its own
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.core.auto_choices import Decisions
from runner.core.errors import Interrupted, RunnerError, StorageError
from runner.launch.config import ExternalLaunchConfig
from runner.run_dir import manifest
from runner.run_dir.folder import RunFolder, display_path, read_mapping, write_atomic, write_json
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.tracker.console import Console
from runner.tracker.jsonl import JsonlTracker, missing_steps, truncate_after
from runner.tracker.text import escape_for_terminal, labeled_line

log = logging.getLogger("runner")
UPSTREAM_RUN = "RUNNER_STAGE"  # set in the environment of a recipe that is run first
TRUST_REMOTE_CODE = "model.trust_remote_code=true"  # what no spec.yaml may say for the user


def is_upstream_run() -> bool:
    """Whether this process runs a recipe that another job needs first."""
    return UPSTREAM_RUN in os.environ


@contextmanager
def status_of(folder: RunFolder, attempt: int) -> Iterator[None]:
    """status.json, as the block goes; report.html after it."""

    def write(state: str, exit_code: int | None = None, error: str | None = None, **more: str) -> None:
        record = {"state": state, "attempt": attempt, "pid": os.getpid(), "exit_code": exit_code, "error": error}
        write_json(folder.status, manifest.redact_values(record | more))

    write("running")
    try:
        yield
    except BaseException as error:
        state = "interrupted" if isinstance(error, Interrupted) else "failed"
        worded = (error.exit_code, str(error)) if isinstance(error, RunnerError) else None
        try:
            write(state, *(worded or (1, f"{type(error).__name__}: {error}")))
        except StorageError as failure:  # the error that ended the run is the one to report
            log.warning("%s", failure)
        write_report(folder, is_said=True)
        raise
    early = manifest.early_stop(read_mapping(folder.manifest))
    write("done", 0, **({} if early is None else {"stopped_early": early}))
    write_report(folder)


def write_report(folder: RunFolder, *, is_said: bool = False) -> None:
    """Write report.html; what prevents that is a warning, as the run itself has ended.

    is_said: name the page on the screen, if any step was finished
    """
    from runner.tools.report.page import write_page

    try:
        write_page(folder, folder.report)
        if is_said and not is_upstream_run() and folder.metrics.is_file() and folder.metrics.stat().st_size:
            Console(folder.log).message(labeled_line("report", display_path(folder.report)))
    except Exception as error:
        again = f"write it again: run report {display_path(folder.root)}"
        log.warning("%s is not written: %s; %s", display_path(folder.report), error or type(error).__name__, again)


def archive_attempt(folder: RunFolder, attempt: int, typed: Sequence[str]) -> None:
    """Move to attempts/N/ what this attempt will rewrite, with the spec before and the typed words."""
    kept = folder.attempts / str(attempt)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for path in (folder.manifest, folder.stacks):
            if path.exists() and path.stat().st_size:
                os.replace(path, kept / path.name)
        write_atomic(kept / folder.spec.name, folder.spec.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"cannot write {kept}: {error.strerror}") from error
    write_yaml(kept / folder.overrides.name, {"typed": manifest.redact_values(typed)})


def write_yaml(path: Path, value: object, head: str = "") -> None:
    """`write_atomic` of YAML, after a line of words."""
    write_atomic(path, head + yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def write_spec(folder: RunFolder, spec: JobSpec) -> None:
    """Write spec.yaml: every value filled in, fit for `run --spec`."""
    write_yaml(
        folder.spec,
        spec_to_write(spec).model_dump(mode="json"),
        head=f"# The resolved job spec. Run it again: run --spec {escape_for_terminal(display_path(folder.spec))}\n",
    )


def spec_to_write(spec: JobSpec) -> JobSpec:
    """The spec without the options that are set again at each start."""
    if not isinstance(spec.launch, ExternalLaunchConfig):
        return spec
    launch = spec.launch.model_copy(update={"node_rank": None, "rdzv_endpoint": None})
    return spec.model_copy(update={"launch": launch})


@dataclass(slots=True)
class RunRecords:
    """Of rank 0, or of the only process."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    decide: Decisions
    made_of: dict[str, Any] = field(default_factory=dict)  # the manifest, but for what was decided
    trackers: list[Any] = field(default_factory=list)

    def truncate_after(self, step: int, console: Console) -> None:
        """Set aside what was written after the checkpoint of `step`, and say what is missing before."""
        truncate_after(self.folder, step, self.attempt)
        if damage := missing_steps(self.folder, step):
            console.message(f"{display_path(self.folder.metrics)} is damaged: {damage}", "warning")

    def open(self, first: int, console: Console) -> None:
        """Open the trackers of a run that continues at step `first`."""
        self.trackers.append(JsonlTracker(self.folder))
        self.trackers.append(
            default_registry().factory(self.spec.tracker)(
                self.spec.tracker,
                folder=self.folder,
                spec=self.spec.model_dump(mode="json"),
                run_id=f"{self.folder.root.parent.name}-{self.folder.root.name}",
                name=self.folder.root.name,
                first_step=first,
                console=console,
                decide=self.decide,
            )
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A finished step's numbers."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some answers."""
        for tracker in self.trackers:
            tracker.log_samples(step, rows)

    def describe(self, device: Mapping[str, Any], processes: Mapping[str, Any]) -> None:
        """Write the manifest: of this process, and what it has to say of all."""
        self.made_of = manifest.collect_manifest(self.spec.model_dump(mode="json"), device) | dict(processes)
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_json(self.folder.manifest, self.made_of | manifest.redact_values(self.decide.records()))

    def close(self, ending: str) -> list[str]:
        """End the trackers; returns what they have to say."""
        lines = [line for tracker in self.trackers for line in tracker.finish(ending)]
        try:
            if self.made_of:  # again: what a tracker had to decide comes out while the run continues
                self._write_manifest()
        except StorageError as failure:
            if ending == "done":
                raise
            log.warning("%s", failure)  # the error that ended the run is the one to report
        return lines


class NullRecords(RunRecords):
    """Of the ranks from 1."""

    def truncate_after(self, step: int, console: Console) -> None:
        """Rank 0 does it."""

    def open(self, first: int, console: Console) -> None:
        """No tracker."""

    def describe(self, device: Mapping[str, Any], processes: Mapping[str, Any]) -> None:
        """No manifest."""
