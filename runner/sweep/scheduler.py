"""Runs the jobs of a sweep: as many at once as fit where they run, the end of one stopping no other.

waiting ─▶ running ─▶ done | failed | killed | timeout | interrupted | pruned
   ▲          └─ killed or out of memory, and tries are left: waits, twice as long each time ─┐
   └──────────────────────────────────────────────────────────────────────────────────────────┘
A change of state is on the disk before anything else happens.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.core.device_kinds import kind_of
from runner.core.errors import OutOfMemory
from runner.core.signals import SignalRecorder
from runner.sweep.config import SweepConfig
from runner.sweep.executor import Executor, ExecutorJob, Say, placement_text, refuse_elsewhere
from runner.sweep.job import FAILED, JobAttempt, StopReason, job_result
from runner.sweep.plan import JobPlan, Plan, SweepFolder, SweepState, append_job, write_job_spec
from runner.sweep.progress import SweepScreen
from runner.sweep.results import MetricsTail
from runner.sweep.search import OptunaTrials, Propose

POLL_S = 0.05
LOOK_S = 0.5  # between looks at the metrics of running jobs
KILLED_S = 30.0  # for an executor to confirm that a killed job is gone
FIRST_RETRY_S = 10.0
RETRYABLE_CODES = (OutOfMemory.exit_code,)  # and whatever a signal ended that was not ours

Command = Callable[[JobPlan, bool], Sequence[str]]  # what starts a job or, where it has begun, resumes it


@dataclass(slots=True)
class RunningJob:
    """A job that the executor has.

    since: when it was first seen to run (monotonic seconds); None while it waits for room there
    reason: why it was stopped, if it was; deadline: when it is killed if it has not ended (monotonic seconds)
    """

    job: ExecutorJob
    metrics: MetricsTail
    since: float | None = None
    reason: StopReason | None = None
    deadline: float = float("inf")

    @property
    def seconds(self) -> float:
        """For how long it has run; 0 while it waits for room."""
        return self.job.seconds or 0.0

    @property
    def pace(self) -> float:
        """Steps per second, of those that were watched."""
        return 0.0 if self.since is None else self.metrics.steps_made / max(time.monotonic() - self.since, 1e-3)


class RunningJobs(dict[int, RunningJob]):
    """The jobs that the executor runs, by index; tells them to save and end, and kills late ones."""

    def __init__(self, options: SweepConfig, executor: Executor, say: Say) -> None:
        super().__init__()
        self._options, self._executor, self._say = options, executor, say

    def stop(self, index: int, reason: StopReason, number: int = signal.SIGTERM) -> None:
        """Signal a job to save and end, once."""
        job = self[index]
        if job.reason is None:
            job.reason, job.deadline = reason, time.monotonic() + self._options.grace_s
            job.job.signal(number)

    def stop_all(self, why: str, number: int, again: bool) -> None:
        """Signal all to save and end, and say so; `again`: Ctrl-C has been pressed before."""
        if self:
            jobs = f"{len(self)} job{'s' if len(self) > 1 else ''}"
            within = f"within {self._options.grace_s:.0f} s (Ctrl-C{' again' if again else ''} kills them)"
            self._say(f"{why}: stopping {jobs}, which save and exit {within}")
        for index in self:
            self.stop(index, StopReason(why), number)

    def kill(self) -> None:
        """Kill all."""
        for job in self.values():
            job.job.signal(signal.SIGKILL)

    def check_clock(self) -> None:
        """Stop jobs that take too long, and kill those that did not stop in time."""
        limit = self._options.timeout_s
        for index, job in self.items():
            if limit is not None and job.reason is None and job.seconds > limit:
                self.stop(index, StopReason(f"not finished after {limit:g} s (sweep.timeout_s)", "timeout"))
            elif time.monotonic() > job.deadline:
                job.deadline = float("inf")
                self._say(f"job {index}  did not exit within {self._options.grace_s:g} s: killed")
                job.job.signal(signal.SIGKILL)

    def end(self) -> None:
        """No job outlives an error that ends the sweep: those that run save first, if they can in time."""
        for job in self.values():
            job.job.signal(signal.SIGTERM)
        self._wait(self._options.grace_s)
        self.kill()
        for index in self._wait(KILLED_S):
            self._say(f"job {index}  may still run: no confirmation of its end within {KILLED_S:g} s")

    def _wait(self, seconds: float) -> list[int]:
        """Wait until all have ended, at most so long; those that have not."""
        end = time.monotonic() + seconds
        while self:
            self._executor.poll()
            left = [index for index, job in self.items() if job.job.poll() is None]
            if not left or time.monotonic() > end:
                return left
            time.sleep(POLL_S)
        return []


class Retries:
    """The tries of each job since the sweep was started, and how many of all jobs have failed for good."""

    def __init__(self, options: SweepConfig) -> None:
        self._options = options
        self.tries: Counter[int] = Counter()
        self._not_before: dict[int, float] = {}
        self._failed = 0

    def wait_s(self, index: int, code: int) -> float | None:
        """Seconds until a job that ended like this is tried again, each time twice as long; None: it is not."""
        if self.tries[index] > self._options.retries or not (code in RETRYABLE_CODES or code < 0):
            return None
        seconds = (self._options.retry_wait_s or FIRST_RETRY_S) * 2.0 ** (self.tries[index] - 1)
        self._not_before[index] = time.monotonic() + seconds
        return seconds

    def is_waiting(self, index: int) -> bool:
        """Whether a job waits for its next try."""
        return self._not_before.get(index, 0.0) > time.monotonic()

    def reason_to_stop(self) -> str:
        """Count a failure; why the sweep stops with it, empty where it continues."""
        self._failed += 1
        most = 1 if self._options.fail_fast else self._options.max_failures
        if most is None or self._failed < most:
            return ""
        return "stopped by sweep.fail_fast" if self._options.fail_fast else f"stopped by sweep.max_failures={most}"


class Scheduler:
    """Runs or resumes a sweep that the caller has locked. `propose` makes jobs from a search's values."""

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        record: SweepState,
        options: SweepConfig,
        executor: Executor,
        propose: Propose | None = None,
    ) -> None:
        self.folder, self.plan, self.record, self.options, self._executor = folder, plan, record, options, executor
        self.screen = SweepScreen(folder, plan, record, options.trials)
        self.trials = None if propose is None else OptunaTrials(folder, plan, options, propose, self.screen.say)
        self._exhausted = self.trials is None
        self.running = RunningJobs(options, executor, self.screen.say)
        self._waiting: list[int] = []
        self._retries = Retries(options)
        self._interrupts = SignalRecorder()
        self._forwarded = 0  # of the signals received, those that the jobs got
        self.stopped = ""  # why no more jobs are started

    @property
    def first_signal(self) -> int | None:
        """The first signal that came, None if there was none."""
        return self._interrupts.stop_signals[0] if self._interrupts.stop_signals else None

    def adopt(self) -> None:
        """Follow the jobs of the sweep before that continue without it, and write down how the others ended.

        Raises EnvironmentProblem where this executor cannot know.
        """
        left = {i: job.identity or {} for i, job in enumerate(self.record) if job.identity or job.state == "running"}
        refuse_elsewhere(left, self.options.on)
        jobs = self._executor.adopt(left, self.options.grace_s, self.screen.say)
        for index in left:
            if index in jobs:
                self._follow(index, jobs[index], "continues, on")
            else:
                self._finish(index, -signal.SIGTERM, StopReason("the sweep ended"), 0.0)
        self._collect()

    def run(self, todo: Sequence[int], command: Command) -> None:
        """Run these jobs to their ends. A first SIGINT or SIGTERM stops all of them, a second kills them."""
        self._waiting = list(todo)
        looked = 0.0
        with self._interrupts.record_signals():
            try:
                while self.running or ((self._waiting or not self._exhausted) and not self.stopped):
                    self._forward_signals()
                    self._collect()
                    self.running.check_clock()
                    self._submit_what_fits(command)
                    self._propose()
                    if time.monotonic() - looked >= LOOK_S:
                        looked = time.monotonic()
                        self._read_metrics()
                    time.sleep(POLL_S)
            finally:
                self.running.end()

    def _submit_what_fits(self, command: Command) -> None:
        """Submit jobs in order. A job that does not fit holds back later ones that need the same devices."""
        held_back: set[str] = set()
        for index in list(self._waiting) if not self.stopped else ():
            job = self.plan.jobs[index]
            if job.need.kind in held_back or self._retries.is_waiting(index):
                continue
            if not self._executor.has_room(job.need):
                held_back.add(job.need.kind)
                continue
            self._waiting.remove(index)
            self._submit(job, command)

    def _propose(self) -> None:
        """Add the next job of a search where there is room and only retries are waiting."""
        if self._exhausted or self.stopped or not all(map(self._retries.is_waiting, self._waiting)):
            return
        assert self.trials is not None and self.plan.search is not None
        if not self._executor.has_room(self.plan.search.need):
            return
        if (job := self.trials.propose_next()) is None:
            self._exhausted = True
            return
        write_job_spec(self.folder, self.plan, job)
        append_job(self.folder, self.plan, job)
        self.record.extend_to(len(self.plan.jobs))
        self._waiting.append(job.index)

    def _submit(self, job: JobPlan, command: Command) -> None:
        """Its token is on the disk before it starts: a resume of a sweep that dies in between finds it again."""
        run = self.folder.run(job.index)
        attempt = JobAttempt(
            index=job.index,
            token=secrets.token_hex(8),
            command=tuple(command(job, run.spec.is_file())),
            again=tuple(command(job, True)),
            run=str(run.root),
            log=str(self.folder.output(job.index)),
            note=str(self.folder.note(job.index)),
            place=self.plan.place,
            grace_s=self.options.grace_s,
            timeout_s=self.options.timeout_s,
            visible=kind_of(job.need.kind).visible,
        )
        known = {"on": self.options.on, "token": attempt.token, "note": attempt.note}
        attempts = self.record[job.index].attempts + 1
        cleared = {"exit_code": None, "error": None, "devices": ()}
        self.record.update(job.index, state="waiting", attempts=attempts, identity=known, **cleared)
        submitted = self._executor.submit(job.need, attempt)
        self.record.update(job.index, identity={**known, **submitted.identity})
        self._follow(job.index, submitted)

    def _follow(self, index: int, job: ExecutorJob, begun: str = "started on") -> None:
        self._retries.tries[index] += 1
        self.running[index] = RunningJob(job, MetricsTail(self.folder.run(index).metrics))
        self._record_start(index, begun)

    def _record_start(self, index: int, begun: str = "started on") -> None:
        running, job = self.running[index], self.plan.jobs[index]
        if running.since is not None or running.job.seconds is None:
            return
        running.since = time.monotonic()
        self.record.update(index, state="running", devices=running.job.devices)
        self.screen.say(f"job {index}  {job.label}: {begun} {placement_text(job.need, running.job.devices)}")

    def _collect(self) -> None:
        """Poll all jobs, and finish those that have ended."""
        self._executor.poll()
        for index, running in list(self.running.items()):
            code = running.job.poll()
            self._record_start(index)
            if code is not None:
                self._read_metrics()  # its last lines
                del self.running[index]
                self._finish(index, code, running.reason, running.seconds, running.job.reason)

    def _finish(
        self, index: int, code: int, reason: StopReason | None, seconds: float, known_there: StopReason | None = None
    ) -> None:
        """Write down how a job ended, and do what follows from it. known_there: the executor's reason."""
        state, error = job_result(code, reason or known_there, self.folder.run(index), self.folder.output(index))
        job, total = self.plan.jobs[index], self.record[index].seconds + seconds
        known = {"exit_code": code, "error": error, "identity": None, "seconds": round(total, 3)}
        again_s = None
        if state in FAILED and state != "timeout" and reason is None and not self.stopped:
            again_s = self._retries.wait_s(index, code)
        if again_s is not None:
            self._waiting.append(index)
            self.record.update(index, state="waiting", **known)
            self.screen.say(f"job {index}  {job.label}: {error}; retrying in {again_s:.0f} s")
            return
        self.record.update(index, state=state, **known)
        if self.trials is not None:
            self.trials.record_end(index, self.record[index])
        text = f"done in {seconds:.1f} s" if state == "done" else f"{state}: {error}"
        self.screen.say(f"job {index}  {job.label}: {text}")
        if state in FAILED and (why := self._retries.reason_to_stop()) and not self.stopped:
            self._stop(why, signal.SIGTERM)

    def _stop(self, why: str, number: int) -> None:
        """Start no more jobs, and signal the running ones to save and end."""
        self.stopped = why
        self.running.stop_all(why, number, again=self.first_signal is not None)

    def _forward_signals(self) -> None:
        received = self._interrupts.stop_signals
        if len(received) == self._forwarded:
            return
        first = self._forwarded == 0
        self._forwarded = len(received)
        if first and not self.stopped:
            self._stop(signal.Signals(received[0]).name, received[0])
        else:
            self.running.kill()

    def _read_metrics(self) -> None:
        """Read the newest metrics of all jobs; stop those that a search gives up."""
        for index, running in self.running.items():
            running.metrics.read()
            if self.trials is not None and running.reason is None and self.trials.should_prune(index, running.metrics):
                why = f"worse than the median of the others at step {running.metrics.step}"
                self.running.stop(index, StopReason(why, "pruned"))
        self.screen.show(self.running)
