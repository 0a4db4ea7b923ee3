"""The trackers of W&B and SwanLab: each has its own upload process, which reads the run's files.

    run ──▶ metrics.jsonl, samples.jsonl ──▶ upload process ──▶ wandb or swanlab
     └─ stdin of that process: "done" and EOF at the end; EOF alone when the run dies
     ◀─ report pipe: open (mode, folder), done, failed

The run never imports these libraries: a step costs one read of a pipe.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from runner.core import subprocess as processes
from runner.core.errors import EnvironmentProblem
from runner.core.subprocess import ChildProcess, JsonLines
from runner.run_dir.folder import RunFolder, display_path, write_json
from runner.run_dir.manifest import redact_values
from runner.tracker.jsonl import NoTracker
from runner.tracker.text import labeled_line

if TYPE_CHECKING:
    from runner.interfaces import Decide
    from runner.tracker.config import UploadConfig
    from runner.tracker.console import Console

RESTARTS = 1


@dataclass(frozen=True, slots=True)
class UploadLibrary:
    """How a library is installed, and its environment variables in the upload process.

    package: name for pip; api_key_variable: of its API key; reported_variables: removed, because they would override
    the spec, and reported to have no effect; private_variables: removed, too, but set by the library itself; defaults:
    set unless the user has set them
    """

    package: str
    api_key_variable: str
    reported_variables: tuple[str, ...]
    private_variables: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)


LIBRARIES = {
    "wandb": UploadLibrary(
        "wandb",
        "WANDB_API_KEY",
        ("WANDB_MODE", "WANDB_DISABLED", "WANDB_DIR", "WANDB_RESUME", "WANDB_RUN_ID"),
        ("WANDB_SERVICE",),
        # wandb reports errors to its makers, even offline. `wandb sync` reads tables from its data folder: that must be
        # in the run folder, because the home folder may be read-only.
        {"WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": "{folder}/data"},
    ),
    "swanlab": UploadLibrary(
        "'posttrain-run[swanlab]'",
        "SWANLAB_API_KEY",
        ("SWANLAB_MODE", "SWANLAB_LOG_DIR", "SWANLAB_RESUME", "SWANLAB_RUN_ID", "SWANLAB_RUN_DIR", "SWANLAB_PARALLEL"),
    ),
}


def build(
    config: UploadConfig,
    *,
    folder: RunFolder,
    spec: Mapping[str, Any],
    run_id: str,
    name: str,
    first_step: int,
    console: Console,
    decide: Decide,
) -> UploadTracker | NoTracker:
    """Start the upload process; if the library is missing, record that no tracker is used."""
    found = importlib.util.find_spec(config.name)
    if found is None or found.origin is None:  # no origin: only a folder of that name, such as wandb/
        reason = f"{config.name} is not installed: pip install {LIBRARIES[config.name].package}, or type tracker=none"
        decide("tracker", config.name, "none", reason)
        return NoTracker()
    for variable in LIBRARIES[config.name].reported_variables:
        is_mode = variable.endswith(("_MODE", "_DISABLED"))
        feature, own = ("tracker.mode", config.mode) if is_mode else ("tracker", "the run's own")
        if (value := os.environ.get(variable, own)) != own:
            decide(feature, f"{variable}={value}", own, f"the variable has no effect; unset {variable}")
    place = folder.root / config.name
    place.mkdir(exist_ok=True)
    chosen = config.model_dump(mode="json", exclude={"name"})
    settings = redact_values({"run_id": run_id, "name": config.display_name or name, **chosen, "config": spec})
    write_json(place / "sink.json", settings)
    return UploadTracker(folder.root, config, console, decide)


class UploadTracker:
    """Supervises the upload process: restarts it if it dies, and limits the wait at the end of the run."""

    def __init__(self, root: Path, config: UploadConfig, console: Console, decide: Decide) -> None:
        self._root, self._library, self._console, self._decide = root, config.name, console, decide
        self._mode, self._deadline_s, self._place = config.mode, config.deadline_s, root / config.name
        self._environment = _environment(self._library, self._place, config.mode)
        self._restarts = RESTARTS
        self._events: dict[str, dict[str, Any]] = {}  # the last report of each kind
        self._process: ChildProcess | None = None
        self._start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Read the reports of the process and detect its end; it reads metrics.jsonl itself."""
        self._check_process()

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The same; it reads samples.jsonl itself."""
        self._check_process()

    def finish(self, status: str) -> list[str]:
        """Wait for the process at most deadline_s; returns how to see or upload the run."""
        end = time.monotonic() + self._deadline_s
        self._check_process()
        if self._process is not None:
            self._close_stdin(status)
            if not self._process.ends_within(max(end - time.monotonic(), 0.1)):
                self._events["failed"] = {"reason": f"the upload did not finish within {self._deadline_s:.0f} s"}
            self._kill_process()
        with contextlib.nullcontext() if status == "done" else contextlib.suppress(EnvironmentProblem):
            self._say_fallback()  # a failed run raises its own error
        return [self._ending()]

    def _start(self) -> None:
        report, writing = os.pipe()
        command = [sys.executable, "-P", "-m", "runner.tracker.upload_process", str(self._place / "sink.json")]
        try:
            with (self._place / "sink.log").open("ab") as log:
                self._process = ChildProcess(
                    [*command, "--report", str(writing), "--parent", str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writing,),
                    env=self._environment,
                )
            self._report, self._reports = report, JsonLines(report)
        except OSError as error:
            os.close(report)
            self._give_up(f"the upload process cannot start: {error.strerror}")
        finally:
            os.close(writing)

    def _check_process(self) -> None:
        """Read reports; restart an ended process once."""
        if self._process is None:
            return
        runs = self._process.is_running()  # checked before reading: its last reports are read
        self._read()
        self._say_fallback()
        if runs:
            return
        code = self._process.returncode
        self._kill_process()
        if "failed" in self._events:
            self._give_up(self._events["failed"]["reason"])
        elif self._restarts:
            self._restarts -= 1
            text = f"the upload process exited with code {code}; restarting it from the first step"
            self._console.message(f"{self._library:8} {text}", "warning")
            self._start()
        else:
            self._give_up(f"the upload failed with {code}; see {display_path(self._place / 'sink.log')}")

    def _read(self) -> None:
        for event in self._reports.receive() or ():
            self._events[event["event"]] = event

    def _say_fallback(self) -> None:
        """Record once why the upload process is offline. Raises EnvironmentProblem in a strict run."""
        if why := self._events.get("open", {}).pop("why", ""):
            self._decide("tracker.mode", self._mode, "offline", f"{self._library}: {why}")

    def _close_stdin(self, status: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its exit code shows
            self._process.stdin.write(status.encode())
            self._process.stdin.close()

    def _kill_process(self) -> None:
        """Kill the process and its children, including wandb-core in its own session, and close both pipes."""
        assert self._process is not None and self._process.stdin is not None
        below = processes.descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._read()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._report)
        reported = self._events.get("open", {}).get("processes", [])
        for pid, started in reported:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                child = psutil.Process(pid)
                if processes.process_identity(pid) == (pid, started):
                    below.append(child)
        processes.kill(below)
        self._process = None

    def _give_up(self, reason: str) -> None:
        self._events["failed"] = {"reason": reason}
        text = f"{reason}; the run continues, metrics.jsonl has every number"
        self._console.message(f"{self._library:8} {text}", "warning")

    def _ending(self) -> str:
        opened, done = self._events.get("open"), self._events.get("done")
        if opened and done:
            where = display_path(self._root / opened["folder"])
            if opened["mode"] == "online" and done["whole"]:
                return labeled_line(self._library, opened["url"])
            why = "the upload is incomplete" if opened["mode"] == "online" else opened["mode"]
            return labeled_line("upload", f"{self._library} sync {where}  # {why}")
        reason = self._events.get("failed", {}).get("reason") or "the upload process died"
        again = f"python -m runner.tracker.upload_process --replay {display_path(self._place / 'sink.json')}"
        text = f"incomplete: {reason}; metrics.jsonl has every number; write it again: {again}"
        return labeled_line(self._library, text)


def _environment(name: str, folder: Path, mode: str) -> dict[str, str]:
    """The environment without variables that override the spec, and offline without the key."""
    library = LIBRARIES[name]
    removed = (*library.reported_variables, *library.private_variables)
    environment = {k: v for k, v in os.environ.items() if k not in removed}
    if mode == "offline":
        environment.pop(library.api_key_variable, None)
    for variable, value in library.defaults.items():
        environment.setdefault(variable, value.format(folder=folder))
    here = str(Path(__file__).resolve().parent.parent.parent)
    if here not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # a checkout
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), here]))
    return environment
