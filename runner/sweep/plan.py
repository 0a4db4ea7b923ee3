"""The plan of a sweep, the state of its jobs, and its folder.

outputs/sweeps/<date>-<time>-<name>-<4 hex>/      outputs/sweeps/latest → the newest
  sweep.json                                      the plan: fixed at the start
  state.json                                      the state of each job: replaced after each change
  sweep.log                                       the messages
  jobs/003.yaml   jobs/003.log                    a job's spec and output
  003/                                            its run folder
  results.csv   results.json   report.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.core.device_kinds import ResourceRequest
from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import (
    OUTPUTS,
    RunFolder,
    latest_path,
    make_unique,
    point_latest,
    read_mapping,
    write_atomic,
    write_json,
)
from runner.sweep.config import Better
from runner.sweep.job import STATES, State, from_json, to_json
from runner.sweep.space import SearchSpace

SWEEPS = OUTPUTS / "sweeps"


def run_name(index: int) -> str:
    """The name of a job's run folder, in the sweep's own."""
    return f"{index:03}"


class SweepFolder:
    """The paths of one sweep."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan, self.state, self.log = root / "sweep.json", root / "state.json", root / "sweep.log"
        self.table, self.results = root / "results.csv", root / "results.json"
        self.report = root / "report.html"  # curves, table, winner, failures and environment

    def spec(self, index: int) -> Path:
        """The spec of a job."""
        return self.root / "jobs" / f"{run_name(index)}.yaml"

    def output(self, index: int) -> Path:
        """The output of a job's process in all attempts."""
        return self.root / "jobs" / f"{run_name(index)}.log"

    def note(self, index: int) -> Path:
        """The JobStatus of a job on another machine (runner.sweep.job)."""
        return self.root / "jobs" / f"{run_name(index)}.note.json"

    def run(self, index: int) -> RunFolder:
        """The run folder of a job."""
        return RunFolder(self.root / run_name(index))


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job: what it varies, its command-line words, and the sections that differ from the base spec."""

    index: int
    varied: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    sections: Mapping[str, Any] = field(default_factory=dict)
    need: ResourceRequest = field(default_factory=ResourceRequest)
    again: tuple[str, ...] = ()  # model.trust_remote_code=true, which only the user may set

    @property
    def label(self) -> str:
        """The varied values: lr=1e-4 seed=2."""
        short = short_names(list(self.varied))
        return " ".join(f"{short[key]}={value}" for key, value in self.varied.items())


@dataclass(frozen=True, slots=True)
class Ranking:
    """How jobs are ranked: a metric, its direction, and which value of a run counts."""

    metric: str
    mode: Better
    take: Literal["best", "last"]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a sweep. base: the first job's spec; rankings: if empty, derived from the results.

    A search appends to `jobs`; nothing else changes.
    """

    name: str
    typed: tuple[str, ...]
    base: Mapping[str, Any]
    jobs: list[JobPlan]
    options: Mapping[str, Any]
    rankings: tuple[Ranking, ...] = ()
    search: SearchSpace | None = None
    place: str = field(default_factory=os.getcwd)  # the folder to which relative paths of the jobs refer
    created: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))

    @property
    def axes(self) -> list[str]:
        """The keys that vary, in the order of the command."""
        of_search = [dimension.key for dimension in self.search.space] if self.search else []
        return list(dict.fromkeys([*of_search, *(key for job in self.jobs for key in job.varied)]))

    def data(self, job: JobPlan) -> dict[str, Any]:
        """A job's whole spec."""
        return {**self.base, **job.sections}


def short_names(keys: list[str]) -> dict[str, str]:
    """key → its last part, if that is unique, else the key."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def create_sweep_folder(name: str, sweeps: Path = SWEEPS) -> SweepFolder:
    """Create a new sweep's folder. Raises StorageError if it cannot."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return SweepFolder(make_unique(sweeps, f"{stamp}-{name}", "sweep's folder", "jobs"))


def write_plan(folder: SweepFolder, plan: Plan) -> None:
    """Write sweep.json, and let `latest` beside the folder point to it. Raises StorageError."""
    write_json(folder.plan, asdict(plan))
    point_latest(RunFolder(folder.root), folder.root.parent)


def write_job_spec(folder: SweepFolder, plan: Plan, job: JobPlan) -> None:
    """Write a job's jobs/003.yaml. Raises StorageError."""
    write_atomic(folder.spec(job.index), str(yaml.safe_dump(plan.data(job), sort_keys=False, allow_unicode=True)))


def append_job(folder: SweepFolder, plan: Plan, job: JobPlan) -> None:
    """Add a job that a search proposes, first to the disk. Raises StorageError."""
    write_json(folder.plan, asdict(replace(plan, jobs=[*plan.jobs, job])))
    plan.jobs.append(job)


def find_sweep(where: str, sweeps: Path = SWEEPS) -> tuple[SweepFolder, Plan]:
    """The sweep named by `where`: `latest` or a folder. Raises EnvironmentProblem if it is not a sweep."""
    root = latest_path(sweeps) if where == "latest" else Path(where)
    folder = SweepFolder(root.resolve())
    try:
        return folder, from_json(Plan, json.loads(folder.plan.read_text(encoding="utf-8")))
    except FileNotFoundError:
        text = f"{root} is not a sweep: it has no sweep.json; expected `latest` or the folder of a sweep"
        raise EnvironmentProblem(text) from None
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{folder.plan} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of one job. seconds: of all attempts.

    identity: with which its executor finds it again (runner.sweep.executor); None if no executor has it
    """

    state: State = "waiting"
    attempts: int = 0
    exit_code: int | None = None
    error: str | None = None
    identity: Mapping[str, Any] | None = None
    devices: tuple[str, ...] = ()
    seconds: float = 0.0


class SweepState(list[JobState]):
    """The states of all jobs, in memory and on the disk."""

    def __init__(self, folder: SweepFolder, jobs: Iterable[JobState]) -> None:
        super().__init__(jobs)
        self._folder = folder

    @classmethod
    def create(cls, folder: SweepFolder, count: int) -> SweepState:
        """All jobs waiting, written."""
        record = cls(folder, [])
        record.extend_to(count)
        return record

    @classmethod
    def read(cls, folder: SweepFolder) -> SweepState:
        """Read state.json. Raises EnvironmentProblem if it cannot be read."""
        try:
            return cls(folder, from_json(list[JobState], read_mapping(folder.state, must_exist=True)["jobs"]))
        except (ValueError, KeyError) as error:
            raise EnvironmentProblem(f"{folder.state} cannot be read: {error}") from error

    def update(self, index: int, **changes: Any) -> None:
        """Change the state of a job, and write it. Raises StorageError."""
        self.update_in_memory(index, **changes)
        self._write()

    def update_in_memory(self, index: int, **changes: Any) -> None:
        """Change the state of a job in memory only."""
        self[index] = replace(self[index], **changes)

    def mark_waiting(self, indices: Iterable[int]) -> None:
        """Set these jobs to waiting, and write it once. Raises StorageError."""
        for index in indices:
            self.update_in_memory(index, state="waiting")
        self._write()

    def extend_to(self, count: int) -> None:
        """Add waiting jobs up to `count`. Raises StorageError."""
        self += [JobState()] * (count - len(self))
        self._write()

    def count_states(self) -> Mapping[State, int]:
        """Number of jobs in each state, without states that have none."""
        counts = {state: sum(job.state == state for job in self) for state in STATES}
        return {state: number for state, number in counts.items() if number}

    def _write(self) -> None:
        lines = [json.dumps(job, allow_nan=False) for job in to_json(list[JobState], self)]
        write_atomic(self._folder.state, '{"jobs": [\n' + ",\n".join(lines) + "\n]}\n")
