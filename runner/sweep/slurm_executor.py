"""Jobs on a Slurm cluster: job arrays, which continue if their sweep ends.

submit, submit, … ─▶ next poll: one array per need ─ submitit ─▶ sbatch ─▶ squeue, status files ─▶ exit codes
                                                                 scancel ◀─ signals

With sweep.parallel, an array starts after the arrays before it have ended, so that the limit holds. submitit's pickles
are not used: slurm/<token>.json has the attempts of an array by index, which is the job's number; the token is the
array's comment in Slurm.
"""

from __future__ import annotations

import math
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from runner.core.device_kinds import ResourceRequest
from runner.core.errors import EnvironmentProblem
from runner.launch.slurm.commands import FINISHED_STATES, USUAL_REASONS, error_text, gres_of, run_slurm, signals_all
from runner.run_dir.folder import write_json
from runner.sweep.config import SweepConfig
from runner.sweep.executor import Identity, JobEnd, RemoteExecutor, RemoteJob, Say
from runner.sweep.job import JobAttempt, StopReason
from runner.sweep.slurm_executor_job import SAVE

if TYPE_CHECKING:
    import submitit

FOLDER = "slurm"  # of a sweep's folder
POLL_S = (0.3, 10.0)  # between two calls of squeue, in the beginning and later
SLOWING = 30.0  # the interval is the time since the start, divided by this
LATE_S = 10.0  # for a status file to appear in a shared folder after its job has ended
MINUTE_S = 60.0
ALREADY_ENDED = ("Invalid job id specified", "already completing or completed")  # scancel, of a job that has ended
FORMAT = "%F|%K|%T|%k|%r"
REASONS = {
    "OUT_OF_MEMORY": StopReason("out of memory (Slurm)", "killed"),
    "TIMEOUT": StopReason("Slurm's time limit", "timeout"),
    "NODE_FAIL": StopReason("its node failed (Slurm)", "killed"),
    "PREEMPTED": StopReason("preempted (Slurm)"),
    "CANCELLED": StopReason("cancelled in Slurm"),
}


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One job of an array in squeue's output. array: its number; reason: why it waits or failed."""

    array: str
    state: str
    reason: str


Queue = Mapping[tuple[str, int], QueueEntry]  # (token of the array, index in it) → its entry


def read_queue(name: str) -> Queue:
    """All jobs of this name in Slurm, including those that ended in the last minutes.

    Raises EnvironmentProblem if Slurm does not respond.
    """
    text = run_slurm("squeue", "--noheader", "--array", "--states=all", f"--name={name}", f"--format={FORMAT}")
    rows = (line.strip().split("|", 4) for line in text.splitlines())
    return {
        (comment, int(index)): QueueEntry(array, state, reason)
        for array, index, state, comment, reason in rows
        if index.isdecimal()
    }


def waiting_reasons(sweep: Path, identities: Mapping[int, Identity]) -> Mapping[int, str]:
    """Job → Slurm's reason why it waits; also for a requeued job.

    Raises EnvironmentProblem if Slurm does not respond.
    """
    tokens = {index: identity["batch"] for index, identity in identities.items() if "batch" in identity}
    queue = read_queue(sweep.name) if tokens else {}
    entries = {index: queue.get((token, index)) for index, token in tokens.items()}
    return {index: entry.reason for index, entry in entries.items() if entry and entry.state == "PENDING"}


class SlurmExecutor(RemoteExecutor):
    """Runs jobs on the cluster to which `sbatch` submits."""

    cards = None  # only the nodes know

    def __init__(self, options: SweepConfig) -> None:
        super().__init__(options)
        self._new: list[tuple[JobAttempt, RemoteJob]] = []  # not submitted yet
        self._tokens: dict[ResourceRequest, str] = {}  # token of the array for each request
        self._arrays: dict[str, str] = {}  # token of an array → its number
        self._queue: Queue = {}
        self._signals: list[tuple[RemoteJob, int]] = []  # not sent yet
        self._began, self._due = time.monotonic(), float("-inf")
        self._folder = Path()  # of the sweep; its name is the name of the jobs in Slurm
        self._say: Say | None = None
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        self._all_signalled = signals_all()
        return self

    def check(self, needs: Iterable[ResourceRequest]) -> None:
        self.needs = list(needs)
        self.parallel = min(self.options.parallel or len(self.needs), len(self.needs))
        own = {"array": array_spec(range(len(self.needs)), self.options.parallel)}
        for need in dict.fromkeys(self.needs):
            executor = submitit_executor(Path.cwd(), submitit_options(self.options, need), own)
            try:
                run_slurm("sbatch", "--test-only", stdin=executor._make_submission_file_text("true", ""))
            except EnvironmentProblem as error:
                raise EnvironmentProblem(f"Slurm rejects a job with {need}: {error}") from error

    def describe(self) -> str:
        each = ", ".join(dict.fromkeys(str(need) for need in self.needs))
        where = f"Slurm, partition {self.options.partition}" if self.options.partition else "Slurm"
        limit = self.options.parallel
        return f"{each} each, on {where}; " + ("Slurm sets the limit" if limit is None else f"{limit} at once")

    def has_room(self, need: ResourceRequest) -> bool:
        """Slurm queues all jobs of a grid; jobs of a search are proposed only when there is room."""
        return self.options.search is None or super().has_room(need)

    def submit(self, need: ResourceRequest, attempt: JobAttempt) -> RemoteJob:
        self._folder = Path(attempt.note).parents[1]
        array = self._tokens.setdefault(need, secrets.token_hex(4))
        job = RemoteJob(self, attempt.index, {"token": attempt.token, "note": attempt.note, "batch": array})
        self._new.append((attempt, job))
        self.add(job)
        return job

    def adopt(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, RemoteJob]:
        self._say = say
        jobs = {index: RemoteJob(self, index, known) for index, known in left.items() if "batch" in known}
        for job in list(jobs.values())[:1]:
            self._folder = Path(job.identity["note"]).parents[1]
            self._read_queue()
        for job in jobs.values():
            job.read_status()
        alive = {index for index, job in jobs.items() if self.find_end(job) is None}
        if alive:
            say(f"job {', '.join(map(str, sorted(alive)))} of the previous sweep process continues in Slurm")
        found = {index: job for index, job in jobs.items() if index in alive or job.has_ended}
        self.add(*found.values())
        return found

    def poll(self) -> None:
        """Submit new jobs, send signals, and call squeue when it is due.

        Raises EnvironmentProblem if Slurm rejects the jobs.
        """
        self._submit_new()
        self._send_signals()
        if time.monotonic() < self._due or not self._arrays:
            return
        self._due = time.monotonic() + min(max((time.monotonic() - self._began) / SLOWING, POLL_S[0]), POLL_S[1])
        try:
            self._read_queue()
        except EnvironmentProblem as error:
            self._log_once(f"{error}; retrying")
            return
        self.version += 1
        for job in self.jobs:  # with an unusual reason, which may last forever
            entry = self._entry(job)
            if entry is not None and entry.state == "PENDING" and entry.reason not in USUAL_REASONS:
                self._log_once(f"job {job.index} waits in Slurm: {entry.reason}")

    def find_end(self, job: RemoteJob) -> JobEnd | None:
        entry = self._entry(job)
        if entry is not None and entry.state not in FINISHED_STATES:
            return None
        reason = REASONS.get(entry.state) if entry else None
        if job.has_ended or (reason is not None and job.status is None):  # it has written its end, or never started
            return JobEnd(reason)
        if reason is None:
            record = f"Slurm reports {entry.state}, {entry.reason}" if entry else "Slurm has no record of it"
            if job.status is None:
                reason = StopReason(f"did not start on its node ({record}); see its log", "failed")
            else:
                reason = StopReason(f"its process on {job.status.host} was killed ({record})", "killed")
        return JobEnd(reason, 0.0 if signal.SIGKILL in job.signals else LATE_S)  # a killed job writes no status

    def signal(self, job: RemoteJob, number: int) -> None:
        if job.identity["batch"] in self._tokens.values():
            job.exit_code = -number  # it was never submitted
        else:
            self._signals.append((job, number))

    def is_queued(self, job: RemoteJob) -> bool:
        entry = self._entry(job)
        return entry is not None and entry.state == "PENDING"  # also a requeued job

    def _entry(self, job: RemoteJob) -> QueueEntry | None:
        return self._queue.get((job.identity["batch"], job.index))

    def _read_queue(self) -> None:
        self._queue = read_queue(self._folder.name)
        self._arrays |= {token: entry.array for (token, _), entry in self._queue.items()}

    def _submit_new(self) -> None:
        for need, token in list(self._tokens.items()):
            attempts = [one for one, job in self._new if job.identity["batch"] == token and job.exit_code is None]
            if attempts:
                path = self._folder / FOLDER / f"{token}.json"
                path.parent.mkdir(exist_ok=True)
                write_json(path, {attempt.index: asdict(attempt) for attempt in attempts})
                self._arrays[token] = self._sbatch(need, path, [attempt.index for attempt in attempts])
                self._due = time.monotonic()
            del self._tokens[need]  # submitted, even if Slurm rejects the next array
        self._new = []

    def _sbatch(self, need: ResourceRequest, path: Path, indices: Sequence[int]) -> str:
        """Submit an array; returns its number. Raises EnvironmentProblem with Slurm's message if rejected."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        own = {"comment": path.stem, "array": array_spec(indices, self.options.parallel)}
        own["output"] = str(self._folder / "jobs" / "%3a.log")
        alive = dict.fromkeys(self._arrays.get(job.identity["batch"], "") for job in self.jobs if job.exit_code is None)
        if self.options.parallel is not None and self.options.search is None and (after := list(filter(None, alive))):
            own["dependency"] = "afterany:" + ":".join(after)  # otherwise there is no limit, or `has_room` applies it
        asked = {**submitit_options(self.options, need), "job_name": self._folder.name}
        executor = submitit_executor(path.parent, asked, own)
        program = ["exec", sys.executable, "-P", "-m", "runner.sweep.slurm_executor_job", str(path)]
        command = shlex.join([*program, gres_of(self.options.gres, need), "all" if self._all_signalled else "first"])
        try:
            job: Any = executor._submit_command(command)
        except (FailedJobError, FailedSubmissionError) as error:
            raise EnvironmentProblem(f"Slurm rejects the jobs: {error_text('sbatch', str(error)) or error}") from error
        return str(job.job_id)

    def _send_signals(self) -> None:
        """Cancel waiting jobs and send signals to running ones."""
        sent, self._signals = self._signals, []
        if not sent:
            return
        self._due = time.monotonic()
        names = [(f"{self._arrays[job.identity['batch']]}_{job.index}", number) for job, number in sent]
        kill = [name for name, number in names if number == signal.SIGKILL]
        save = [name for name, number in names if number != signal.SIGKILL]
        try:
            if kill:
                scancel("--full", "--signal=KILL", *kill)
                scancel(*kill)
            if save:
                scancel("--state=PENDING", *save)
                scancel("--batch", f"--signal={int(SAVE)}", *save)
        except EnvironmentProblem as error:
            self._log_once(f"{error}; jobs that do not exit within sweep.grace_s are cancelled")

    def _log_once(self, text: str) -> None:
        if self._say is not None and text not in self._said:
            self._said.add(text)
            self._say(text)


def scancel(*arguments: str) -> None:
    """Call scancel; a job that has already ended is not an error.

    Raises EnvironmentProblem for other errors of Slurm.
    """
    try:
        run_slurm("scancel", *arguments)
    except EnvironmentProblem as error:
        if not all(any(ended in text for ended in ALREADY_ENDED) for text in str(error).split("; ")):
            raise


def submitit_options(options: SweepConfig, need: ResourceRequest) -> dict[str, Any]:
    """The resources of one job by submitit's names; `additional_parameters` has other options of sbatch."""
    limit = options.timeout_s  # shorter than Slurm's, so that a job can save and report why it ended
    asked: dict[str, Any] = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": options.cpus or (need.count if need.kind == "core" else None),
        "gres": None if need.kind == "core" else f"{gres_of(options.gres, need)}:{need.count}",
        "time": None if limit is None else math.ceil((limit + options.grace_s) / MINUTE_S) + 1,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
    }
    more: dict[str, Any] = {"requeue": True, "signal": f"B:USR2@{math.ceil(options.grace_s)}"}
    return {**asked, "additional_parameters": {**more, **dict(options.sbatch)}}


def array_spec(indices: Iterable[int], at_once: int | None) -> str:
    """`0-3,7%2`: the jobs of an array and the number of concurrent ones."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return text if at_once is None else f"{text}%{at_once}"


def submitit_executor(folder: Path, asked: Mapping[str, Any], own: Mapping[str, Any]) -> submitit.SlurmExecutor:
    """submitit's executor with its parameters. Raises EnvironmentProblem if submitit is missing."""
    try:
        from submitit import SlurmExecutor as Submitter
    except ImportError as error:
        text = "sweep.on=slurm needs the package submitit: pip install 'posttrain-run[slurm]'"
        raise EnvironmentProblem(text) from error
    run_slurm("sbatch", "--version")
    executor = Submitter(folder)
    executor.update_parameters(**{**asked, "additional_parameters": {**asked["additional_parameters"], **own}})
    return executor
