"""How far a run is, read from its folder, during and after the run, on any machine that sees it.

status.json ─ state        members/*.json ─ processes, and what the kernel says of those on this machine
metrics.jsonl ─ its end    checkpoints/   slurm/job.json ─ what Slurm says          nothing is written

A run's standing as lines of text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from runner.core.errors import EnvironmentProblem
from runner.core.rank_info import Host
from runner.launch.slurm.commands import state_of
from runner.run_dir.folder import RunFolder, display_path, is_locked, read_mapping, read_spec, run_argument
from runner.spec.evaluation import HIGH, LOW
from runner.tracker.jsonl import complete_lines
from runner.tracker.text import (
    METRICS,
    count_noun,
    escape_for_terminal,
    format_duration,
    format_metric,
    format_number,
    labeled_line,
    print_text,
)

TAIL_BYTES = 2**18  # of metrics.jsonl
RECENT = 10  # steps whose mean is the time of a step
SILENT_S = 30.0  # a list of members that is older says nothing of now: a shared disk may show a change seconds late
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process of a run.

    `state`: runs, stopped, gone, ended; on another machine also silent (it has sent nothing) and elsewhere (nobody
    there watches it).
    """

    name: str
    role: str
    log: str
    state: str
    host: str = ""
    pid: int | None = None
    step: int | None = None
    heard_s: float | None = None
    replaced: int = 0


MEMBER_KEYS = ("name", "role", "log", "host", "pid", "step", "replaced")  # of a member, by its list


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as it stands. `numbers`: metric → (step, value), the newest; times in seconds.

    clients: of `run tinker`, the steps of each training client; None for a job that makes its own steps
    """

    folder: str
    name: str
    state: str
    attempt: int | None
    exit_code: int | None
    error: str | None
    stopped_early: str | None
    step: int
    steps: int
    step_s: float | None
    left_s: float | None
    members: list[ProcessStatus]
    numbers: dict[str, tuple[int, float | None]]
    clients: dict[str, int] | None
    checkpoint: int | None
    checkpoint_age_s: float | None
    slurm: dict[str, str] | None
    logs: list[str]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        numbers = {name: {"step": step, "value": value} for name, (step, value) in self.numbers.items()}
        return asdict(self) | {"numbers": numbers}


def read_run_status(folder: RunFolder) -> RunStatus:
    """Read it. Raises EnvironmentProblem where the folder cannot be read."""
    spec, status = read_spec(folder).data, read_mapping(folder.status)
    rows = _tail(folder.metrics)
    seconds = [row["perf/step_s"] for row in rows[-RECENT:] if row.get("perf/step_s") is not None]
    step, steps = int(rows[-1]["step"]) if rows else 0, int(spec["steps"])
    pace = fmean(seconds) if seconds else None
    state, members = str(status.get("state", "unknown")), _processes(folder, status)
    if state == "running":
        state = _running(folder, members)
    newest = max(folder.checkpoints.glob("step-*/MANIFEST.json"), default=None)
    logs = [folder.log, *(folder.root / member.log for member in members)]
    return RunStatus(
        folder=str(folder.root),
        name=str(spec.get("name", "")),
        state=state,
        attempt=status.get("attempt"),
        exit_code=status.get("exit_code"),
        error=status.get("error"),
        stopped_early=status.get("stopped_early"),
        step=step,
        steps=steps,
        step_s=pace,
        left_s=pace * (steps - step) if pace is not None and state == "running" else None,
        members=members,
        numbers={key: (int(row["step"]), value) for row in rows for key, value in row.items() if key != "step"},
        clients=_clients(folder) if spec.get("algorithm", {}).get("name") == "tinker" else None,
        checkpoint=int(STEP.findall(newest.parent.name)[0]) if newest else None,
        checkpoint_age_s=_age_s(newest.stat().st_mtime) if newest else None,
        slurm=_slurm(folder),
        logs=[str(path) for path in dict.fromkeys(logs) if path.is_file()],
    )


def _clients(folder: RunFolder) -> dict[str, int]:
    """The steps of each training client, by its folder, the oldest first."""
    files = sorted(folder.root.glob("clients/*/metrics.jsonl"), key=lambda path: path.stat().st_ctime)
    return {path.parent.name: int(rows[-1]["step"]) if (rows := _tail(path)) else 0 for path in files}


def _running(folder: RunFolder, members: list[ProcessStatus]) -> str:
    """The state of a run that recorded no end: running, silent, or killed where its launcher has exited."""
    launcher = next((member for member in members if member.role == "launcher"), None)
    if launcher is None or launcher.host == Host.current().host:
        return "running" if is_locked(folder) else "killed"
    return {"gone": "killed", "silent": "silent"}.get(launcher.state, "running")


def _processes(folder: RunFolder, status: Mapping[str, Any]) -> list[ProcessStatus]:
    """The launcher of each machine and what it has started; where there is none, the ranks."""
    lists = [read_mapping(path) for path in sorted(folder.members.glob("*.json"))]
    lists = [found for found in lists if found.get("attempt") == status.get("attempt")]
    if lists:
        return [
            member for index, found in enumerate(lists) for member in _watched_processes(found, f"launcher {index}")
        ]
    ranks = read_mapping(folder.manifest).get("ranks", [])
    if not ranks or status.get("pid") != ranks[0]["pid"]:  # of an attempt before
        return []
    ended = status.get("state") != "running"
    return [_unwatched_rank(index, len(ranks), rank, ended) for index, rank in enumerate(ranks)]


def _unwatched_rank(index: int, size: int, rank: Mapping[str, Any], ended: bool) -> ProcessStatus:
    """A rank without a supervisor: the only process of a run, or one that torchrun has started."""
    is_here = rank["host"] == Host.current().host
    state = "ended" if ended else _state_here(rank["pid"]) if is_here else "elsewhere"
    log = f"ranks/{index}.log" if index else "run.log"
    role = "rank" if index else "launcher"  # it holds the run's folder
    return ProcessStatus(f"rank {index} of {size}", role, log, state, rank["host"], rank["pid"])


def _watched_processes(found: Mapping[str, Any], name: str) -> list[ProcessStatus]:
    """The launcher, under this name, and the members in its list."""
    age = _age_s(found["written"])
    own = {"name": name, "role": "launcher", "runs": not found["over"], "log": "run.log"}
    return [_process(one, age) for one in ({**own, **found["launcher"]}, *found["members"])]


def _process(one: Mapping[str, Any], age: float) -> ProcessStatus:
    here = Host.current()
    state = "runs" if one["runs"] else "ended"
    if one["runs"] and (one.get("host"), one.get("boot_id")) == (here.host, here.boot_id):
        state = _state_here(one["pid"])
    elif one["runs"] and age > SILENT_S:
        state = "silent"
    heard = _age_s(one["heard"]) if "heard" in one and state != "ended" else None
    return ProcessStatus(**{key: one[key] for key in MEMBER_KEYS if key in one}, state=state, heard_s=heard)


def _state_here(pid: int) -> str:
    """The state of a process on this machine, by the kernel."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "runs"


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last steps' numbers; a line that is being written is left out."""
    try:
        return [json.loads(line) for line in complete_lines(path, TAIL_BYTES)]
    except ValueError as error:
        raise EnvironmentProblem(f"{path} is damaged: {error}") from error


def _slurm(folder: RunFolder) -> dict[str, str] | None:
    """The newest Slurm job of the run, and what Slurm says of it where it answers."""
    kept = read_mapping(folder.slurm / "job.json")
    if not kept:
        return None
    try:
        found = state_of(kept["job"])
        state, reason = found if found is not None else ("forgotten", "Slurm has no record of it")
    except EnvironmentProblem as error:
        state, reason = "not known", str(error)
    return {**kept, "state": state, "reason": reason}


def _age_s(moment: float) -> float:
    """Seconds since a moment (since 1970); clocks of two machines may differ a little."""
    return max(datetime.now(UTC).timestamp() - moment, 0.0)


def note_killed(folder: RunFolder) -> None:
    """Print that a run was killed: a process that the kernel kills for memory cannot print it."""
    try:
        found = read_run_status(folder)
    except EnvironmentProblem:  # not a run that was killed; `run status` and `run resume` name what it is
        return
    if found.state == "killed":
        name = display_path(folder.root)
        text = f"note: {name} was killed at {_progress(found)}: by kill -9, or by the kernel for memory"
        print_text(f"{text} (see dmesg); to continue it: run resume {name}", file=sys.stderr)


LINES: dict[str, list[str]] = METRICS["status"]
COUNTS: list[str] = METRICS["counts"]
GO_ON = ("interrupted", "failed", "killed")


def status_lines(run: RunStatus) -> Iterator[str]:
    """What `run status` prints."""
    folder = RunFolder(Path(run.folder))
    yield f"{display_path(folder.root)}: {_headline(run)}"
    if run.error:
        yield labeled_line("error", escape_for_terminal(run.error.splitlines()[0]))
    if run.stopped_early:
        yield labeled_line("ended", escape_for_terminal(run.stopped_early))
    if (job := run.slurm) is not None:
        yield labeled_line("slurm", f"job {job['job']}: {job['state']} ({job['reason']}); log {_path(job['log'])}")
    yield from _table(run.members)
    for name, steps in (run.clients or {}).items():
        yield labeled_line("client", f"{name}: {count_noun(steps, 'step')}")
    for about, names in LINES.items():
        if found := [key for name in names for key in run.numbers if _is_of(key, name) and _is_shown(run, key)]:
            yield labeled_line(about, " · ".join(_number(run, key) for key in found))
    if run.checkpoint is not None and run.checkpoint_age_s is not None:
        yield labeled_line("saved", f"step {run.checkpoint}, {format_duration(run.checkpoint_age_s)} ago")
    elif run.step:
        yield labeled_line("saved", "nothing yet")
    if run.logs:
        yield labeled_line("logs", ", ".join(map(_path, run.logs)))
    if run.state in GO_ON:
        yield labeled_line("continue", f"run resume {run_argument(folder)}")


def _progress(run: RunStatus) -> str:
    if run.clients is None:
        return f"step {run.step} of {run.steps}"
    steps = count_noun(sum(run.clients.values()), "step")
    return f"{count_noun(len(run.clients), 'training client')} with {steps}"


def _headline(run: RunStatus) -> str:
    parts = [run.state, _progress(run)]
    if run.attempt is not None and run.attempt > 1:
        parts.insert(1, f"attempt {run.attempt}")
    if run.exit_code:
        parts.insert(1, f"exit code {run.exit_code}")
    if run.step_s is not None:
        parts.append(f"{format_number(run.step_s)} s a step")
    if run.left_s is not None:
        parts.append(f"{format_duration(run.left_s)} left")
    return " · ".join(parts)


def _table(members: list[ProcessStatus]) -> Iterator[str]:
    """The processes, a line each."""
    width = max((len(member.name) for member in members), default=0)
    where = [f"{member.host or '?'}:{member.pid or '?'}" for member in members]
    wide = max(map(len, where), default=0)
    for member, place in zip(members, where, strict=True):
        parts = [member.state]
        if member.step is not None:
            parts.append(f"step {member.step}")
        if member.heard_s is not None:
            parts.append(f"heartbeat {format_number(round(member.heard_s, 1))} s ago")
        if member.replaced:
            parts.append(f"restarted {count_noun(member.replaced, 'time')}")
        yield labeled_line("process", f"{member.name.ljust(width)}  {place.ljust(wide)}  {', '.join(parts)}")


def _is_of(key: str, name: str) -> bool:
    """Whether a metric is the one of this name, or one below it where it ends in a slash."""
    return key.startswith(name) and not key.endswith((LOW, HIGH)) if name.endswith("/") else key == name


def _is_shown(run: RunStatus, key: str) -> bool:
    return key not in COUNTS or run.numbers[key][1] != 0


def _number(run: RunStatus, key: str) -> str:
    """Its name and value, with the step where that is not the newest."""
    step, value = run.numbers[key]
    text = "not finite" if value is None else format_metric(key, value)
    return f"{key} {text}" + (f" (step {step})" if step != run.step else "")


def _path(path: str) -> str:
    return display_path(Path(path))
