"""The commands of a sweep: start, resume, status, report.

plan ─▶ sweep.json, jobs/*.yaml ─▶ scheduler ─▶ results.csv, results.json, report.html ─▶ tables, winner, failures
                ▲                     │ Ctrl-C, kill -9
                └────── resume ◀──────┘
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.core.device_kinds import ResourceRequest
from runner.core.errors import EnvironmentProblem, Interrupted, Problem, SpecError, SweepFailed
from runner.run_dir.folder import RunFolder, display_path, hold_lock, is_locked, read_mapping, run_argument
from runner.spec.base import iter_leaves
from runner.sweep import local_executor, ray_executor, slurm_executor
from runner.sweep import plan as plans
from runner.sweep import report as reports
from runner.sweep.config import SweepConfig
from runner.sweep.executor import Executor
from runner.sweep.job import FAILED, FINISHED, SILENT_S, StopReason, heartbeat_age_s, job_result, read_status
from runner.sweep.plan import JobPlan, Plan, SweepFolder, SweepState
from runner.sweep.results import read_results, write_files
from runner.sweep.scheduler import Command, Scheduler
from runner.sweep.search import Propose
from runner.tracker.text import format_duration, labeled_line


@dataclass(frozen=True, slots=True)
class ResumeSelection:
    """Which unfinished jobs a resume runs: all, or those of `only`."""

    retry_failed: bool = False
    only: tuple[int, ...] = ()


def make_executor(options: SweepConfig) -> Executor:
    """The executor that `sweep.on` names; it connects when its context is entered."""
    executors: Mapping[str, Callable[[SweepConfig], Executor]] = {
        "local": local_executor.LocalExecutor,
        "ray": ray_executor.RayExecutor,
        "slurm": slurm_executor.SlurmExecutor,
    }
    return executors[options.on](options)


def start_sweep(
    folder: SweepFolder,
    plan: Plan,
    options: SweepConfig,
    executor: Executor,
    command: Command | None = None,
    propose: Propose | None = None,
) -> int:
    """Run a new sweep in its folder; returns 0. propose: creates a job from a search's values.

    Raises SweepFailed, Interrupted.
    """
    executor.check(resource_requests(plan, options))
    with hold_lock(RunFolder(folder.root)):
        for job in plan.jobs:
            plans.write_job_spec(folder, plan, job)
        record = SweepState.create(folder, len(plan.jobs))
        plans.write_plan(folder, plan)
        scheduler = Scheduler(folder, plan, record, options, executor, propose)
        scheduler.screen.say(*reports.plan_lines(folder, plan, options, executor.describe(), executor.parallel))
        scheduler.adopt()
        return _run(scheduler, range(len(plan.jobs)), command)


def resume_sweep(
    folder: SweepFolder,
    plan: Plan,
    wanted: ResumeSelection,
    options: SweepConfig,
    executor: Executor,
    command: Command | None = None,
    propose: Propose | None = None,
) -> int:
    """Continue a sweep: finished jobs do not run again, jobs that still run on a cluster are followed.

    Raises SweepFailed, Interrupted, SpecError.
    """
    with hold_lock(RunFolder(folder.root)):
        refuse_changed(folder, plan)
        record = SweepState.read(folder)
        record.extend_to(len(plan.jobs))  # a search was killed between the two files
        executor.check(resource_requests(plan, options, record))
        scheduler = Scheduler(folder, plan, record, options, executor, None if wanted.only else propose)
        scheduler.adopt()
        todo = [index for index in jobs_to_run(record, wanted) if index not in scheduler.running]
        new = 0 if scheduler.trials is None else max((options.trials or 0) - len(plan.jobs), 0)
        where = display_path(folder.root)
        scheduler.screen.say(f"sweep    {where}: {_state_counts(record)}; now {len(todo) + new} to run")
        if not todo and not new and not scheduler.running:
            return _finish(scheduler)
        record.mark_waiting(todo)
        return _run(scheduler, todo, command)


def print_status(where: str) -> int:
    """Print the progress of a sweep that runs or has ended; returns 0. Changes no file."""
    folder, plan = plans.find_sweep(where)
    record, running = SweepState.read(folder), is_locked(RunFolder(folder.root))
    lines = [] if running else list(_update_states(folder, record))
    print(f"{display_path(folder.root)}: {_state_counts(record)}; {'running' if running else 'not running'}")
    print("\n".join([*reports.job_table(read_results(folder, plan, record)), *lines]))
    if not running and any(job.state not in FINISHED for job in record):
        print(labeled_line("continue", f"run sweep resume {run_argument(RunFolder(folder.root), plans.SWEEPS)}"))
    return 0


def rewrite_report(where: str) -> int:
    """Write results.csv, results.json and report.html of an interrupted sweep; returns 0."""
    folder, plan = plans.find_sweep(where)
    record = SweepState.read(folder)
    for line in () if is_locked(RunFolder(folder.root)) else _update_states(folder, record):
        print(line)
    results = read_results(folder, plan, record)
    write_files(results)
    reports.write_page(results)
    print(display_path(folder.report))
    return 0


def make_job_command(folder: SweepFolder) -> Command:
    """The function that returns the command of a job: a start, or a resume if it has begun."""

    def command(job: JobPlan, begun: bool) -> list[str]:
        run = folder.run(job.index)
        runner = [sys.executable, "-P", "-m", "runner"]
        if begun:
            return [*runner, "resume", str(run.root), *job.again]
        return [*runner, "--spec", str(folder.spec(job.index)), "--folder", str(run.root), *job.again]

    return command


def jobs_to_run(record: SweepState, wanted: ResumeSelection) -> list[int]:
    """The jobs to run now. Raises EnvironmentProblem for one that does not exist or is finished."""
    for index in wanted.only:
        if not 0 <= index < len(record):
            raise EnvironmentProblem(f"--only {index}: the jobs are 0 to {len(record) - 1}")
        if record[index].state in FINISHED:
            text = f"--only {index}: job {index} is {record[index].state}; a finished job does not run again"
            raise EnvironmentProblem(text)

    if wanted.only:
        return list(wanted.only)
    skipped = FINISHED if wanted.retry_failed else FINISHED | FAILED
    return [index for index, job in enumerate(record) if job.state not in skipped]


def refuse_changed(folder: SweepFolder, plan: Plan) -> None:
    """Raise SpecError naming every option of jobs/*.yaml that differs from the plan."""
    problems = []
    for job in plan.jobs:
        path = folder.spec(job.index)
        now, before = dict(iter_leaves(read_mapping(path, must_exist=True))), dict(iter_leaves(plan.data(job)))
        for key in dict.fromkeys([*before, *now]):
            if now.get(key) != before.get(key) or (key in now) != (key in before):
                was, is_now = (repr(values[key]) if key in values else "not there" for values in (before, now))
                text = f"was {was} when the sweep began, is {is_now}; restore it, or start a new sweep"
                problems.append(Problem(key, text, display_path(path)))
    if problems:
        raise SpecError(problems)


def resource_requests(plan: Plan, options: SweepConfig, record: SweepState | None = None) -> list[ResourceRequest]:
    """Resources of the jobs, with those that a search will propose; with a record, of unfinished jobs."""
    later = [] if plan.search is None else [plan.search.need] * max((options.trials or 0) - len(plan.jobs), 0)
    left = [job for job in plan.jobs if record is None or record[job.index].state not in FINISHED]
    return [job.need for job in left] + later


def _state_counts(record: SweepState) -> str:
    return ", ".join(f"{count} {state}" for state, count in record.count_states().items())


def _update_states(folder: SweepFolder, record: SweepState) -> Iterator[str]:
    """Update `record`, in memory only, with jobs of a sweep whose process has ended.

    Yields a line for each job that still waits or runs.
    """
    left = {index: job.identity for index, job in enumerate(record) if job.identity is not None}
    queued: Mapping[int, str] = {}
    try:
        queued = slurm_executor.waiting_reasons(folder.root, left)
    except EnvironmentProblem as error:
        yield f"note     {error}; the states below are from the jobs' own files"
    for index, known in left.items():
        if index in queued:
            record.update_in_memory(index, state="waiting")
            yield f"waiting  job {index}  in Slurm: {queued[index]}"
        elif known.get("on") == "local":  # without a pid, the sweep ended before it could record it
            if "pid" not in known or not local_executor.is_alive((known["pid"], known["started"])):
                _record_end(folder, record, index, -signal.SIGTERM, StopReason("the sweep ended"))
        elif (noted := read_status(Path(known["note"]), known["token"])) is None:
            yield f"waiting  job {index}  was submitted and has not started"
        else:
            record.update_in_memory(index, devices=noted.where, seconds=record[index].seconds + noted.seconds)
            if noted.exit_code is None:
                record.update_in_memory(index, state="running")
                silent = heartbeat_age_s(Path(known["note"]))
                gone = f"no heartbeat for {format_duration(silent)}: its machine may be lost; a resume checks this"
                yield f"runs     job {index}  on {noted.host}, {'its sweep stopped' if silent <= SILENT_S else gone}"
            else:
                _record_end(folder, record, index, noted.exit_code, noted.reason)


def _record_end(folder: SweepFolder, record: SweepState, index: int, code: int, reason: StopReason | None) -> None:
    state, error = job_result(code, reason, folder.run(index), folder.output(index))
    record.update_in_memory(index, state=state, exit_code=code, error=error)


def _run(scheduler: Scheduler, todo: Sequence[int], command: Command | None) -> int:
    with scheduler.screen:
        scheduler.run(todo, command or make_job_command(scheduler.folder))
    return _finish(scheduler)


def _finish(scheduler: Scheduler) -> int:
    record, results = scheduler.record, read_results(scheduler.folder, scheduler.plan, scheduler.record)
    write_files(results)
    reports.write_page(results)
    scheduler.screen.say(*reports.ending_lines(results))
    total, again = len(record), f"run sweep resume {run_argument(RunFolder(scheduler.folder.root), plans.SWEEPS)}"
    failed = sum(job.state in FAILED for job in record)
    left = sum(job.state not in FAILED | FINISHED for job in record)
    if scheduler.first_signal is not None:
        raise Interrupted(scheduler.first_signal, f"{total - failed - left} of {total} jobs done; continue: {again}")
    if left:
        raise SweepFailed(f"{failed} of {total} jobs failed, {left} not finished\n  continue: {again}")
    if failed:
        raise SweepFailed(f"{failed} of {total} jobs failed\n  retry: {again} --retry-failed")
    return 0
