"""How far each job of a sweep is: state.json, replaced as a whole after each change, so that a crash loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from runner.errors import EnvironmentProblem
from runner.folder import RunFolder, is_locked, locked, write_atomic
from runner.sweep.plan import SweepFolder

State = Literal["waiting", "running", "done", "pruned", "failed", "killed", "timeout", "interrupted"]
STATES: tuple[State, ...] = get_args(State)
FAILED: frozenset[State] = frozenset({"failed", "killed", "timeout"})
FINISHED: frozenset[State] = frozenset({"done", "pruned"})  # never run again


@dataclass(frozen=True, slots=True)
class JobState:
    """How far one job is. `seconds`: of all its attempts.

    identity: with which the site that runs it finds it again (runner.sweep.site); None where it is with none
    """

    state: State = "waiting"
    attempts: int = 0
    exit_code: int | None = None
    error: str | None = None
    identity: Mapping[str, Any] | None = None
    devices: tuple[str, ...] = ()
    seconds: float = 0.0


class Record:
    """The states of all jobs, in memory and on the disk."""

    def __init__(self, folder: SweepFolder, jobs: Sequence[JobState]) -> None:
        self._folder = folder
        self._jobs = list(jobs)
        self._lines = [_line(job) for job in jobs]

    @classmethod
    def begin(cls, folder: SweepFolder, count: int) -> Record:
        """All jobs waiting, written."""
        record = cls(folder, [JobState()] * count)
        record._write()
        return record

    @classmethod
    def read(cls, folder: SweepFolder) -> Record:
        """As a sweep left it. Raises EnvironmentProblem where it cannot be read."""
        try:
            content = json.loads(folder.state.read_text(encoding="utf-8"))["jobs"]
            return cls(folder, [_job(job) for job in content])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise EnvironmentProblem(f"{folder.state} cannot be read: {error}") from error

    def __getitem__(self, index: int) -> JobState:
        return self._jobs[index]

    def __iter__(self) -> Iterator[JobState]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def change(self, index: int, **changes: Any) -> None:
        """Change what is known of a job, and write it. Raises StorageError."""
        self.assume(index, **changes)
        self._write()

    def assume(self, index: int, **changes: Any) -> None:
        """Change what is known of a job in memory only."""
        self._jobs[index] = replace(self._jobs[index], **changes)
        self._lines[index] = _line(self._jobs[index])

    def wait(self, indices: Iterable[int]) -> None:
        """Have these jobs wait for their turn, and write it once. Raises StorageError."""
        for index in indices:
            self.assume(index, state="waiting")
        self._write()

    def grow(self, count: int) -> None:
        """Make it one of `count` jobs, the new ones waiting. Raises StorageError."""
        more = [JobState()] * (count - len(self._jobs))
        self._jobs += more
        self._lines += [_line(job) for job in more]
        self._write()

    def count(self) -> Mapping[State, int]:
        """How many jobs are in each state, those without a job left out."""
        counts = {state: sum(job.state == state for job in self._jobs) for state in STATES}
        return {state: number for state, number in counts.items() if number}

    def _write(self) -> None:
        write_atomic(self._folder.state, '{"jobs": [\n' + ",\n".join(self._lines) + "\n]}\n")


def _line(job: JobState) -> str:
    """A job as it stands in the file: made when it changes, as the file is written once for each change of any."""
    return json.dumps(asdict(job), allow_nan=False)


def _job(data: dict[str, Any]) -> JobState:
    return JobState(devices=tuple(data.pop("devices")), **data)


@contextmanager
def held(folder: SweepFolder) -> Iterator[None]:
    """The sweep for this process alone, until the block or the process ends. Raises EnvironmentProblem."""
    with locked(RunFolder(folder.root)):
        yield


def is_held(folder: SweepFolder) -> bool:
    """Whether a living process runs the sweep."""
    return is_locked(RunFolder(folder.root))
