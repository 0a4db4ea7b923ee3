"""What an attempt writes to the run's folder.

status_of(folder)        the launcher: status.json: running ─▶ done | interrupted | failed; then report.html
archive_attempt(folder)  the launcher, before another attempt: moves files that it will rewrite to attempts/N/
RunRecords               rank 0: manifest, metrics, samples, trackers; archives what a resume removes
NullRecords              other ranks: nothing but their log
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
from runner.core.fsync_io import storage_errors
from runner.launch.config import ExternalLaunchConfig
from runner.run_dir import manifest
from runner.run_dir.folder import RunFolder, display_path, read_mapping, write_atomic, write_json
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.spec.saved_spec import KEY, SCHEMA
from runner.tracker.console import Console
from runner.tracker.jsonl import JsonlTracker, missing_steps, truncate_after
from runner.tracker.text import escape_for_terminal, labeled_line

log = logging.getLogger("runner")
UPSTREAM_RUN = "RUNNER_STAGE"  # variable of a run that another job needs first
TRUST_REMOTE_CODE = "model.trust_remote_code=true"  # which only the user may set, not a spec.yaml


def is_upstream_run() -> bool:
    """Whether this process runs a recipe that another job needs first."""
    return UPSTREAM_RUN in os.environ


@contextmanager
def status_of(folder: RunFolder, attempt: int) -> Iterator[None]:
    """Keep status.json up to date with the block; write report.html after it."""

    def write(state: str, exit_code: int | None = None, error: str | None = None, **more: str) -> None:
        record = {"state": state, "attempt": attempt, "pid": os.getpid(), "exit_code": exit_code, "error": error}
        write_json(folder.status, manifest.redact_values(record | more))

    write("running")
    try:
        yield
    except BaseException as error:
        text = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
        state = "interrupted" if isinstance(error, Interrupted) else "failed"
        try:
            write(state, getattr(error, "exit_code", RunnerError.exit_code), text)
        except StorageError as failure:  # the error that ended the run is the one to report
            log.warning("%s", failure)
        write_report(folder, announce=True)
        raise
    early = manifest.early_stop(read_mapping(folder.manifest))
    write("done", 0, **({} if early is None else {"stopped_early": early}))
    write_report(folder)


def write_report(folder: RunFolder, *, announce: bool = False) -> None:
    """Write report.html; an error is only a warning, because the run itself has ended.

    announce: print the page's path, if a step was finished
    """
    from runner.tools.report.page import write_page

    try:
        write_page(folder, folder.report)
        if announce and not is_upstream_run() and folder.metrics.is_file() and folder.metrics.stat().st_size:
            Console(folder.log).message(labeled_line("report", display_path(folder.report)))
    except Exception as error:
        again = f"write it again: run report {display_path(folder.root)}"
        log.warning("%s is not written: %s; %s", display_path(folder.report), error or type(error).__name__, again)


def archive_attempt(folder: RunFolder, attempt: int, typed: Sequence[str]) -> None:
    """Move files that this attempt will rewrite to attempts/N/, with the earlier spec and the typed words."""
    kept = folder.attempts / str(attempt)
    with storage_errors(f"cannot write {kept}"):
        kept.mkdir(parents=True, exist_ok=True)
        for path in (folder.manifest, folder.stacks):
            if path.exists() and path.stat().st_size:
                os.replace(path, kept / path.name)
        write_atomic(kept / folder.spec.name, folder.spec.read_text(encoding="utf-8"))
    write_yaml(kept / folder.overrides.name, {"typed": manifest.redact_values(typed)})


def write_yaml(path: Path, value: object, head: str = "") -> None:
    """Write YAML atomically, after the text `head`."""
    write_atomic(path, head + yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def write_spec(folder: RunFolder, spec: JobSpec) -> None:
    """Write spec.yaml, with all values, for `run --spec`."""
    write_yaml(
        folder.spec,
        {KEY: SCHEMA, **spec_to_write(spec).model_dump(mode="json")},
        head=f"# The resolved job spec. Run it again: run --spec {escape_for_terminal(display_path(folder.spec))}\n",
    )


def tracker_run_id(folder: RunFolder) -> str:
    """The id at W&B and SwanLab: one for all attempts; a new run in a folder of this name has another."""
    parts = folder.root.parent.name, folder.root.name, read_mapping(folder.overrides).get("run_id_suffix")
    return "-".join(filter(None, parts))


def spec_to_write(spec: JobSpec) -> JobSpec:
    """The spec without options that the launcher sets at each start."""
    if not isinstance(spec.launch, ExternalLaunchConfig):
        return spec
    launch = spec.launch.model_copy(update={"node_rank": None, "rdzv_endpoint": None})
    return spec.model_copy(update={"launch": launch})


@dataclass(slots=True)
class RunRecords:
    """The records of rank 0."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    decide: Decisions
    made_of: dict[str, Any] = field(default_factory=dict)  # the manifest without automatic choices
    trackers: list[Any] = field(default_factory=list)

    def truncate_after(self, step: int, console: Console) -> None:
        """Move lines after the checkpoint of `step` aside, and warn of missing earlier ones."""
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
                run_id=tracker_run_id(self.folder),
                name=self.folder.root.name,
                first_step=first,
                console=console,
                decide=self.decide,
            )
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a finished step."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log samples."""
        for tracker in self.trackers:
            tracker.log_samples(step, rows)

    def describe(self, device: Mapping[str, Any], processes: Mapping[str, Any]) -> None:
        """Write the manifest. processes: the facts of all ranks."""
        self.made_of = manifest.collect_manifest(self.spec.model_dump(mode="json"), device) | dict(processes)
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_json(self.folder.manifest, self.made_of | manifest.redact_values(self.decide.records()))

    def close(self, ending: str) -> list[str]:
        """Close the trackers; returns their last messages."""
        lines = [line for tracker in self.trackers for line in tracker.finish(ending)]
        try:
            if self.made_of:  # again, with the automatic choices that trackers made during the run
                self._write_manifest()
        except StorageError as failure:
            if ending == "done":
                raise
            log.warning("%s", failure)  # the error that ended the run is the one to report
        return lines


@dataclass(slots=True)
class TrainingClientRecords:
    """The records of a server's training clients, each with a folder of its own in clients/; of rank 0."""

    spec: JobSpec
    folder: RunFolder
    decide: Decisions
    console: Console
    opened: dict[str, tuple[RunRecords, list[float]]] = field(default_factory=dict)  # with steps, loss, tokens

    def open(self, record: Any) -> None:
        """Open the trackers of a new training client (a `runner.tinker.checkpoints.ClientRecord`)."""
        name = record.model_id.replace(":", "-")
        records = RunRecords(self.spec, RunFolder(self.folder.root / "clients" / name), 1, self.decide)
        records.open(0, self.console)
        self.opened[record.model_id] = (records, [0, 0.0, 0.0])
        lora = record.lora
        self.console.message(f"client   {name}: LoRA of rank {lora.rank}, seed {lora.seed}")

    def add_pass(self, model_id: str, metrics: Mapping[str, float]) -> None:
        """Add the loss of a forward_backward to its step."""
        sums = self.opened[model_id][1]
        sums[1:] = [sums[1] + metrics["loss:sum"], sums[2] + metrics["tokens:sum"]]

    def log_step(self, model_id: str, metrics: Mapping[str, float]) -> None:
        """Log a finished step: the loss is the mean of the trained tokens."""
        records, sums = self.opened[model_id]
        step, loss, tokens = int(sums[0]) + 1, sums[1], sums[2]
        sums[:] = [step, 0.0, 0.0]
        values = {f"train/{name.partition(':')[0]}": value for name, value in metrics.items()}
        records.log(step, values | {"train/loss": loss / max(tokens, 1), "train/tokens": tokens})

    def close(self, model_id: str) -> list[str]:
        """Close the trackers of a training client that ends; returns their last messages."""
        found = self.opened.pop(model_id, None)
        return [] if found is None else found[0].close("done")


class NullRecords(RunRecords):
    """The records of ranks from 1: nothing is written."""

    def truncate_after(self, step: int, console: Console) -> None:
        """Done by rank 0."""

    def open(self, first: int, console: Console) -> None:
        """No tracker."""

    def describe(self, device: Mapping[str, Any], processes: Mapping[str, Any]) -> None:
        """No manifest."""
