"""One attempt of a job: its command, its status file, and its result.

scheduler ─ JobAttempt ─▶ executor ─▶ the process ─▶ exit code, StopReason ─▶ job_result ─▶ state.json
                                          └─ JobStatus (jobs/003.note.json), where that is another machine: replaced
                                             when it begins and when it ends, touched every few seconds in between
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import TypeAdapter

from runner.core.errors import EnvironmentProblem
from runner.core.signals import signal_name
from runner.run_dir.folder import RunFolder, read_mapping, write_json

T = TypeVar("T")
State = Literal["waiting", "running", "done", "pruned", "failed", "killed", "timeout", "interrupted"]
STATES: tuple[State, ...] = get_args(State)
FAILED: frozenset[State] = frozenset({"failed", "killed", "timeout"})
FINISHED: frozenset[State] = frozenset({"done", "pruned"})  # never run again
STOP_CODES = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGINT, 128 + signal.SIGTERM)
TOUCH_S = 5.0  # between two heartbeats of a job
SILENT_S = 30.0  # without a heartbeat, after which the machine counts as lost; shared folders show changes late
TAIL_BYTES = 8192
LONGEST = 300  # characters of an error in a table


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why a job was stopped or lost, and its state after that."""

    why: str
    state: State = "interrupted"


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """All that an executor needs to run a job once. JSON as `asdict`; all paths are absolute.

    index: the job's number; token: unique to this attempt
    again: the command if Slurm starts the job again and its run folder, `run`, exists
    log: file to which its output is appended; note: the file of its JobStatus; place: its working directory
    grace_s: seconds from the stop signal until it is killed; timeout_s: seconds until it gets the stop signal
    visible: the variable that lists its cards, if it needs any
    environment: variables in addition to those of the machine where it runs
    """

    index: int
    token: str
    command: tuple[str, ...]
    again: tuple[str, ...]
    run: str
    log: str
    note: str
    place: str
    grace_s: float
    timeout_s: float | None = None
    visible: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of one attempt, written by the machine that runs it. Times are seconds since the epoch.

    token: of the attempt; process: pid of the job's wrapper; devices: its cards
    exit_code: negative for a signal; None while it runs; reason: why the wrapper stopped it
    """

    token: str
    host: str
    process: int
    began: float
    devices: tuple[str, ...] = ()
    ended: float | None = None
    exit_code: int | None = None
    reason: StopReason | None = None

    @property
    def seconds(self) -> float:
        """Duration of the job until now, or until its end."""
        return max((now() if self.ended is None else self.ended) - self.began, 0.0)

    @property
    def where(self) -> tuple[str, ...]:
        """Its cards, or its machine if it has none."""
        return self.devices or (self.host,)

    def write(self, path: Path) -> None:
        """Replace the status file. Raises StorageError."""
        write_json(path, asdict(self))

    def write_end(self, path: Path, exit_code: int, reason: StopReason | None = None) -> None:
        """Replace the status file once the job has ended. Raises StorageError."""
        replace(self, ended=now(), exit_code=exit_code, reason=reason).write(path)


def now() -> float:
    """Seconds since the epoch."""
    return datetime.now().timestamp()


def from_json(kind: type[T], data: Any) -> T:
    """A dataclass from the parsed JSON of its `asdict`. Raises ValueError if it does not fit."""
    return cast(T, _adapter(cast(Any, kind)).validate_python(data))


def to_json(kind: type[T], value: T) -> Any:
    """A dataclass, or a list of them, as JSON-able data; faster than `asdict` for many."""
    return _adapter(cast(Any, kind)).dump_python(value, mode="json")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # slow to make
    return TypeAdapter(kind)


def read_status(path: Path, token: str) -> JobStatus | None:
    """The status of this attempt; None if there is none yet, or only that of another attempt."""
    # empty if the file does not exist yet or cannot be read for a moment; the next poll reads it again
    data = read_if_whole(path)
    return from_json(JobStatus, data) if data.get("token") == token else None


def heartbeat_age_s(path: Path) -> float:
    """Seconds since a job's last heartbeat; infinite if there was none."""
    try:
        return max(now() - path.stat().st_mtime, 0.0)
    except OSError:
        return float("inf")


def job_result(code: int, reason: StopReason | None, run: RunFolder, output: Path) -> tuple[State, str | None]:
    """The state of a job with this exit code (negative: a signal), and its error, None if it is done.

    reason: why the job was stopped, None if it was not
    """
    status = read_if_whole(run.status)
    if status.get("state") == "done" and (code == 0 or reason):
        return "done", None
    if code == 0:
        what = f"its status is {status.get('state')}" if status else "its status.json is missing or unreadable"
        return "failed", f"exited with code 0, but {what}"
    if reason and code in STOP_CODES:
        return reason.state, reason.why
    if code < 0:
        return "killed", f"killed by {signal_name(-code)}"
    if code in STOP_CODES:
        return "interrupted", f"stopped by {signal_name(code - 128)}"
    text = str(status.get("error") or "") if status.get("exit_code") == code else ""
    line = " ".join(text.split())[:LONGEST] or last_line(output)
    return "failed", f"exit code {code}" + (f": {line}" if line else "")


def read_if_whole(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; empty if it cannot be read."""
    try:
        return read_mapping(path)
    except EnvironmentProblem:
        return {}


def last_line(output: Path) -> str:
    """The last line of a job's output, shortened for a table."""
    try:
        with output.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip()[:LONGEST] for line in reversed(lines) if line.strip()), "")
