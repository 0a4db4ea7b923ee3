"""What a sweep is, how far each of its jobs is, and its folder.

outputs/sweeps/<date>-<time>-<name>-<4 hex>/      outputs/sweeps/latest → the newest
  sweep.json                                      what was planned: fixed when it begins
  state.json                                      how far each job is: replaced after each change
  sweep.log                                       what was said
  jobs/003.yaml   jobs/003.log                    a job's spec, and what it printed
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
from runner.run_dir.folder import OUTPUTS, RunFolder, make_unique, point_latest, read_mapping, write_atomic, write_json
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
        """What a job has to do."""
        return self.root / "jobs" / f"{run_name(index)}.yaml"

    def output(self, index: int) -> Path:
        """What a job's process printed, over all its attempts."""
        return self.root / "jobs" / f"{run_name(index)}.log"

    def note(self, index: int) -> Path:
        """The JobStatus of a job that runs elsewhere (runner.sweep.job)."""
        return self.root / "jobs" / f"{run_name(index)}.note.json"

    def run(self, index: int) -> RunFolder:
        """What a job leaves."""
        return RunFolder(self.root / run_name(index))


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job: what it varies, its command-line words, and the sections that differ from the base spec."""

    index: int
    varied: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    sections: Mapping[str, Any] = field(default_factory=dict)
    need: ResourceRequest = field(default_factory=ResourceRequest)
    again: tuple[str, ...] = ()  # what no spec.yaml may say for the user: model.trust_remote_code=true

    @property
    def label(self) -> str:
        """What it varies, in short: lr=1e-4 seed=2."""
        short = short_names(list(self.varied))
        return " ".join(f"{short[key]}={value}" for key, value in self.varied.items())


@dataclass(frozen=True, slots=True)
class Ranking:
    """What makes a job better: a metric, whether more of it is better, and which of a run's values counts."""

    metric: str
    mode: Better
    take: Literal["best", "last"]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a sweep. `base` is the first job's spec; without `rankings`, results decide on one.

    A search appends to `jobs`; nothing else of it ever changes.
    """

    name: str
    typed: tuple[str, ...]
    base: Mapping[str, Any]
    jobs: list[JobPlan]
    options: Mapping[str, Any]
    rankings: tuple[Ranking, ...] = ()
    search: SearchSpace | None = None
    place: str = field(default_factory=os.getcwd)  # where it was begun: relative paths of its jobs are read from there
    created: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))

    @property
    def axes(self) -> list[str]:
        """The keys that vary, in the order in which they were given."""
        of_search = [dimension.key for dimension in self.search.space] if self.search else []
        return list(dict.fromkeys([*of_search, *(key for job in self.jobs for key in job.varied)]))

    def data(self, job: JobPlan) -> dict[str, Any]:
        """A job's whole spec."""
        return {**self.base, **job.sections}


def short_names(keys: list[str]) -> dict[str, str]:
    """key → its last part, where no other key ends in the same."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def create_sweep_folder(name: str, sweeps: Path = SWEEPS) -> SweepFolder:
    """Make a new sweep's folder. Raises StorageError where it cannot."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return SweepFolder(make_unique(sweeps, f"{stamp}-{name}", "sweep's folder", "jobs"))


def write_plan(folder: SweepFolder, plan: Plan) -> None:
    """Write sweep.json and make `latest`, beside the folder, point to it. Raises StorageError."""
    write_json(folder.plan, asdict(plan))
    point_latest(RunFolder(folder.root), folder.root.parent)


def write_job_spec(folder: SweepFolder, plan: Plan, job: JobPlan) -> None:
    """Write a job's jobs/003.yaml. Raises StorageError."""
    write_atomic(folder.spec(job.index), str(yaml.safe_dump(plan.data(job), sort_keys=False, allow_unicode=True)))


def append_job(folder: SweepFolder, plan: Plan, job: JobPlan) -> None:
    """Add a job that a search proposes, on the disk first. Raises StorageError."""
    write_json(folder.plan, asdict(replace(plan, jobs=[*plan.jobs, job])))
    plan.jobs.append(job)


def find_sweep(where: str, sweeps: Path = SWEEPS) -> tuple[SweepFolder, Plan]:
    """The sweep called `where`: `latest`, or a folder. Raises EnvironmentProblem when it is none."""
    root = sweeps / "latest" if where == "latest" else Path(where)
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
    """How far one job is. `seconds`: of all its attempts.

    identity: with which its executor finds it again (runner.sweep.executor); None where it is with none
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
        """As a sweep left it. Raises EnvironmentProblem where it cannot be read."""
        try:
            return cls(folder, from_json(list[JobState], read_mapping(folder.state, must_exist=True)["jobs"]))
        except (ValueError, KeyError) as error:
            raise EnvironmentProblem(f"{folder.state} cannot be read: {error}") from error

    def update(self, index: int, **changes: Any) -> None:
        """Change what is known of a job, and write it. Raises StorageError."""
        self.update_in_memory(index, **changes)
        self._write()

    def update_in_memory(self, index: int, **changes: Any) -> None:
        """Change what is known of a job in memory only."""
        self[index] = replace(self[index], **changes)

    def mark_waiting(self, indices: Iterable[int]) -> None:
        """Have these jobs wait for their turn, and write it once. Raises StorageError."""
        for index in indices:
            self.update_in_memory(index, state="waiting")
        self._write()

    def extend_to(self, count: int) -> None:
        """Make it one of `count` jobs, the new ones waiting. Raises StorageError."""
        self += [JobState()] * (count - len(self))
        self._write()

    def count_states(self) -> Mapping[State, int]:
        """How many jobs are in each state, those without a job left out."""
        counts = {state: sum(job.state == state for job in self) for state in STATES}
        return {state: number for state, number in counts.items() if number}

    def _write(self) -> None:
        lines = [json.dumps(job, allow_nan=False) for job in to_json(list[JobState], self)]
        write_atomic(self._folder.state, '{"jobs": [\n' + ",\n".join(lines) + "\n]}\n")
