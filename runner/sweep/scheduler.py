"""Runs the jobs of a sweep, independently: as many at once as the executor has room for.

waiting ─▶ running ─▶ done | failed | killed | timeout | interrupted | pruned
   ▲          └─ killed or out of memory, and retries are left: waits, twice as long each time ─┐
   └────────────────────────────────────────────────────────────────────────────────────────────┘
Each change of state is written to the disk first.
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
from runner.core.signals import SignalRecorder, signal_name
from runner.sweep.config import SweepConfig
from runner.sweep.executor import Executor, ExecutorJob, Say, placement_text, refuse_elsewhere
from runner.sweep.job import FAILED, JobAttempt, StopReason, job_result
from runner.sweep.plan import JobPlan, Plan, SweepFolder, SweepState, append_job, write_job_spec
from runner.sweep.progress import SweepScreen
from runner.sweep.results import MetricsTail
from runner.sweep.search import OptunaTrials, Propose

POLL_S = 0.05
READ_S = 0.5  # between reads of the metrics of running jobs
KILLED_S = 30.0  # for an executor to confirm that a killed job is gone
FIRST_RETRY_S = 10.0
RETRYABLE_CODES = (OutOfMemory.exit_code,)  # and jobs that a signal of another sender ended

Command = Callable[[JobPlan, bool], Sequence[str]]  # (job, has it begun) → its command


@dataclass(slots=True)
class RunningJob:
    """A job that was submitted to the executor.

    since: when it was first seen running (monotonic seconds); None while it waits
    reason: why the sweep stopped it, if it did; deadline: when it is killed if it still runs (monotonic seconds)
    """

    job: ExecutorJob
    metrics: MetricsTail
    since: float | None = None
    reason: StopReason | None = None
    deadline: float = float("inf")

    @property
    def seconds(self) -> float:
        """Duration of its process; 0 while it waits."""
        return self.job.seconds or 0.0

    @property
    def pace(self) -> float:
        """Steps per second since the first read of its metrics."""
        return 0.0 if self.since is None else self.metrics.steps_made / max(time.monotonic() - self.since, 1e-3)


class RunningJobs(dict[int, RunningJob]):
    """The submitted jobs, by index; stops them, and kills those that do not end in time."""

    def __init__(self, options: SweepConfig, executor: Executor, say: Say) -> None:
        super().__init__()
        self._options, self._executor, self._say = options, executor, say

    def stop(self, index: int, reason: StopReason, number: int = signal.SIGTERM) -> None:
        """Send a job, once, the signal to save and end."""
        job = self[index]
        if job.reason is None:
            job.reason, job.deadline = reason, time.monotonic() + self._options.grace_s
            job.job.signal(number)

    def stop_all(self, why: str, number: int, again: bool) -> None:
        """Send all jobs the signal to save and end. again: Ctrl-C was pressed before."""
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
        """Stop jobs after their timeout, and kill those that did not end within grace_s."""
        limit = self._options.timeout_s
        for index, job in self.items():
            if limit is not None and job.reason is None and job.seconds > limit:
                self.stop(index, StopReason(f"not finished after {limit:g} s (sweep.timeout_s)", "timeout"))
            elif time.monotonic() > job.deadline:
                job.deadline = float("inf")
                self._say(f"job {index}  did not exit within {self._options.grace_s:g} s: killed")
                job.job.signal(signal.SIGKILL)

    def end(self) -> None:
        """End all jobs, because the sweep ends: they may save within grace_s, then they are killed."""
        for job in self.values():
            job.job.signal(signal.SIGTERM)
        self._wait(self._options.grace_s)
        self.kill()
        for index in self._wait(KILLED_S):
            self._say(f"job {index}  may still run: no confirmation of its end within {KILLED_S:g} s")

    def _wait(self, seconds: float) -> list[int]:
        """Wait until all have ended; returns those that still run after the timeout."""
        end = time.monotonic() + seconds
        while self:
            self._executor.poll()
            left = [index for index, job in self.items() if job.job.poll() is None]
            if not left or time.monotonic() > end:
                return left
            time.sleep(POLL_S)
        return []


class Retries:
    """Attempts per job since this start of the sweep, and the number of failed jobs."""

    def __init__(self, options: SweepConfig) -> None:
        self._options = options
        self.tries: Counter[int] = Counter()
        self._not_before: dict[int, float] = {}
        self._failed = 0

    def wait_s(self, index: int, code: int) -> float | None:
        """Seconds until a job with this exit code is retried, doubled each time; None = no retry."""
        if self.tries[index] > self._options.retries or not (code in RETRYABLE_CODES or code < 0):
            return None
        seconds = (self._options.retry_wait_s or FIRST_RETRY_S) * 2.0 ** (self.tries[index] - 1)
        self._not_before[index] = time.monotonic() + seconds
        return seconds

    def is_waiting(self, index: int) -> bool:
        """Whether a job waits for its next attempt."""
        return self._not_before.get(index, 0.0) > time.monotonic()

    def reason_to_stop(self) -> str:
        """Count a failure; returns why the sweep stops, empty if it continues."""
        self._failed += 1
        most = 1 if self._options.fail_fast else self._options.max_failures
        if most is None or self._failed < most:
            return ""
        return "stopped by sweep.fail_fast" if self._options.fail_fast else f"stopped by sweep.max_failures={most}"


class Scheduler:
    """Runs or resumes a sweep that the caller has locked. propose: creates a job from a search's values."""

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
        self._forwarded = 0  # number of received signals that were forwarded
        self.stopped = ""  # why no more jobs are started

    @property
    def first_signal(self) -> int | None:
        """The first received signal; None if there was none."""
        return self._interrupts.stop_signals[0] if self._interrupts.stop_signals else None

    def adopt(self) -> None:
        """Follow jobs of the previous sweep process that still run, and record the end of the others.

        Raises EnvironmentProblem if another executor has them.
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
        """Run these jobs to their end. A first SIGINT or SIGTERM stops all of them, a second kills them."""
        self._waiting = list(todo)
        last_read = 0.0
        with self._interrupts.record_signals():
            try:
                while self.running or ((self._waiting or not self._exhausted) and not self.stopped):
                    self._forward_signals()
                    self._collect()
                    self.running.check_clock()
                    self._submit_what_fits(command)
                    self._propose()
                    if time.monotonic() - last_read >= READ_S:
                        last_read = time.monotonic()
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
        """Submit a job. Its token is written first, so that a resume finds a job whose sweep died meanwhile."""
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
        """Record the end of a job; retry it, or stop the sweep. known_there: the executor's reason."""
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
        """Start no more jobs, and stop the running ones."""
        self.stopped = why
        self.running.stop_all(why, number, again=self.first_signal is not None)

    def _forward_signals(self) -> None:
        received = self._interrupts.stop_signals
        if len(received) == self._forwarded:
            return
        first = self._forwarded == 0
        self._forwarded = len(received)
        if first and not self.stopped:
            self._stop(signal_name(received[0]), received[0])
        else:
            self.running.kill()

    def _read_metrics(self) -> None:
        """Read the newest metrics of all jobs; stop those that the search prunes."""
        for index, running in self.running.items():
            running.metrics.read()
            if self.trials is not None and running.reason is None and self.trials.should_prune(index, running.metrics):
                why = f"worse than the median of the others at step {running.metrics.step}"
                self.running.stop(index, StopReason(why, "pruned"))
        self.screen.show(self.running)
