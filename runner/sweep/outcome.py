"""What became of a job, from its exit code and what it left behind."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.folder import RunFolder
from runner.sweep.record import State

ENDED_BY_US = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGINT, 128 + signal.SIGTERM)
TAIL_BYTES = 8192
LONGEST = 300  # characters of an error in a table


@dataclass(frozen=True, slots=True)
class Told:
    """Why the sweep told a job to stop, and what it is then."""

    why: str
    state: State = "interrupted"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended; `error` None where it is done."""

    state: State
    error: str | None


def judge(code: int, told: Told | None, run: RunFolder, output: Path) -> Ended:
    """The state that an exit code (negative: a signal) means, for a job that was told to stop or was not."""
    said = status(run)
    if said.get("state") == "done" and (code == 0 or told):
        return Ended("done", None)
    if code == 0:
        what = f"its status is {said.get('state')}" if said else "left no status that can be read (status.json)"
        return Ended("failed", f"ended with exit code 0, but {what}")
    if told and code in ENDED_BY_US:
        return Ended(told.state, told.why)
    if code < 0:
        return Ended("killed", f"killed by {_name(-code)}")
    if code in ENDED_BY_US:
        return Ended("interrupted", f"stopped by {_name(code - 128)}")
    text = str(said.get("error") or "") if said.get("exit_code") == code else ""
    line = " ".join(text.split())[:LONGEST] or last_line(output)
    return Ended("failed", f"exit code {code}" + (f": {line}" if line else ""))


def status(run: RunFolder) -> dict[str, Any]:
    """A run's status.json; empty where there is none that can be read."""
    try:
        content = json.loads(run.status.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the exit code tells enough
    return dict(content) if isinstance(content, dict) else {}


def last_line(output: Path) -> str:
    """The last line that a job printed, cut to what a table holds."""
    try:
        with output.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip()[:LONGEST] for line in reversed(lines) if line.strip()), "")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
