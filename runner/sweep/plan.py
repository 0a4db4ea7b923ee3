"""What a sweep is: its jobs and how they are ranked, fixed when it begins and kept in sweep.json; and its folder.

outputs/sweeps/<date>-<time>-<name>-<4 hex>/      outputs/sweeps/latest → the newest
  sweep.json   state.json   sweep.log             what was planned, how far each job is, what was said
  jobs/003.yaml   jobs/003.log                    a job's spec, and what it printed
  003/                                            its run folder
  results.csv   results.json   report.html
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.errors import EnvironmentProblem, StorageError
from runner.folder import OUTPUTS, RunFolder, point_latest, write_atomic, write_json
from runner.sweep.need import Need
from runner.sweep.space import Search, of_json

SWEEPS = OUTPUTS / "sweeps"
Mode = Literal["max", "min"]


def run_name(index: int) -> str:
    """The name of a job's run folder, in the sweep's own."""
    return f"{index:03}"


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The paths of one sweep."""

    root: Path

    @property
    def plan(self) -> Path:
        """What the jobs are; never changed."""
        return self.root / "sweep.json"

    @property
    def state(self) -> Path:
        """How far each job is; replaced after each change."""
        return self.root / "state.json"

    @property
    def log(self) -> Path:
        """What the sweep said."""
        return self.root / "sweep.log"

    @property
    def table(self) -> Path:
        """One row per job."""
        return self.root / "results.csv"

    @property
    def results(self) -> Path:
        """A header and one entry per job."""
        return self.root / "results.json"

    @property
    def report(self) -> Path:
        """One page with curves, table, winner, failures and environment."""
        return self.root / "report.html"

    def spec(self, index: int) -> Path:
        """What a job is asked to do."""
        return self.root / "jobs" / f"{run_name(index)}.yaml"

    def output(self, index: int) -> Path:
        """What a job's process printed, over all its attempts."""
        return self.root / "jobs" / f"{run_name(index)}.log"

    def note(self, index: int) -> Path:
        """What who runs a job away from here says of it (runner.sweep.note)."""
        return self.root / "jobs" / f"{run_name(index)}.note.json"

    def run(self, index: int) -> RunFolder:
        """What a job leaves."""
        return RunFolder(self.root / run_name(index))


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job: what it varies, the words that make it, and the sections in which its spec is not the sweep's base."""

    index: int
    varied: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    sections: Mapping[str, Any] = field(default_factory=dict)
    need: Need = field(default_factory=Need)
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
    mode: Mode
    take: Literal["best", "last"]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep as it was begun. `base` is the first job's spec; no `rankings`: one is found when results are there.

    A search appends to `jobs`; nothing else of it ever changes.
    """

    name: str
    typed: tuple[str, ...]
    base: Mapping[str, Any]
    jobs: list[JobPlan]
    options: Mapping[str, Any]
    rankings: tuple[Ranking, ...] = ()
    search: Search | None = None
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


def create(name: str, sweeps: Path = SWEEPS) -> SweepFolder:
    """Make a new sweep's folder, unique under concurrent starts. Raises StorageError where it cannot."""
    now = datetime.now()
    root = sweeps
    try:
        sweeps.mkdir(parents=True, exist_ok=True)
        while True:
            root = sweeps / f"{now.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(2)}"
            with suppress(FileExistsError):  # another start drew the same name in the same second: draw again
                root.mkdir()
                (root / "jobs").mkdir()
                return SweepFolder(root.absolute())
    except OSError as error:
        raise StorageError(f"cannot make the sweep's folder {root}: {error.strerror}") from error


def write(folder: SweepFolder, plan: Plan) -> None:
    """Write sweep.json and make `latest`, beside the folder, point to it. Raises StorageError."""
    write_json(folder.plan, asdict(plan))
    point_latest(RunFolder(folder.root), folder.root.parent)


def write_spec(folder: SweepFolder, plan: Plan, job: JobPlan) -> None:
    """Write a job's jobs/003.yaml. Raises StorageError."""
    write_atomic(folder.spec(job.index), str(yaml.safe_dump(plan.data(job), sort_keys=False, allow_unicode=True)))


def append(folder: SweepFolder, plan: Plan, job: JobPlan) -> None:
    """Add a job that a search proposes, on the disk first. Raises StorageError."""
    write_json(folder.plan, asdict(replace(plan, jobs=[*plan.jobs, job])))
    plan.jobs.append(job)


def find(where: str, sweeps: Path = SWEEPS) -> tuple[SweepFolder, Plan]:
    """The sweep called `where`: `latest`, or a folder. Raises EnvironmentProblem when it is none."""
    root = sweeps / "latest" if where == "latest" else Path(where)
    folder = SweepFolder(root.resolve())
    try:
        return folder, _plan(json.loads(folder.plan.read_text(encoding="utf-8")))
    except FileNotFoundError:
        text = f"{root}: no sweep there (no sweep.json); `latest` or the folder of a sweep is expected"
        raise EnvironmentProblem(text) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EnvironmentProblem(f"{folder.plan} cannot be read: {error}") from error


def _plan(data: dict[str, Any]) -> Plan:
    jobs = [_job(job) for job in data.pop("jobs")]
    search, typed = data.pop("search"), tuple(data.pop("typed"))
    rankings = tuple(Ranking(**ranking) for ranking in data.pop("rankings"))
    return Plan(jobs=jobs, search=None if search is None else of_json(search), rankings=rankings, typed=typed, **data)


def _job(data: dict[str, Any]) -> JobPlan:
    need, words, again = Need(**data.pop("need")), tuple(data.pop("words")), tuple(data.pop("again"))
    return JobPlan(need=need, words=words, again=again, **data)
