"""A sweep from its first job to its report: start, resume, report.

plan ─▶ sweep.json, jobs/*.yaml ─▶ engine ─▶ results.csv, results.json, report.html ─▶ tables, winner, failures
                ▲                     │ Ctrl-C, kill -9
                └────── resume ◀──────┘
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from runner.errors import EnvironmentProblem, Interrupted, Problem, SpecError, SweepFailed
from runner.folder import shown
from runner.spec.origin import leaves
from runner.sweep import plan as plans
from runner.sweep import words
from runner.sweep.config import SweepConfig
from runner.sweep.engine import Command, Engine
from runner.sweep.need import Need
from runner.sweep.page import write_page
from runner.sweep.plan import JobPlan, Plan, SweepFolder
from runner.sweep.record import FAILED, FINISHED, JobState, Record, held, is_held
from runner.sweep.results import gather, write_files
from runner.sweep.screen import SweepScreen
from runner.sweep.search import Propose, Trials
from runner.sweep.site import Site
from runner.sweep.status import catch_up


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which jobs a resume runs, of those that are not done: the unfinished ones, unless `only` names others."""

    retry_failed: bool = False
    only: tuple[int, ...] = ()


def start(
    folder: SweepFolder,
    plan: Plan,
    options: SweepConfig,
    site: Site,
    command: Command | None = None,
    propose: Propose | None = None,
) -> int:
    """Run a new sweep in its folder; returns 0. `propose` makes jobs of a search's values.

    Raises SweepFailed, Interrupted.
    """
    site.admit(needs(plan, options))
    with held(folder):
        for job in plan.jobs:
            plans.write_spec(folder, plan, job)
        record = Record.begin(folder, len(plan.jobs))
        plans.write(folder, plan)
        screen = SweepScreen(folder, plan, record, options.trials)
        source = None if propose is None else Trials(folder, plan, options, propose, screen.say)
        screen.say_all(words.planned(folder, plan, options, site.describe(), site.parallel))
        engine = Engine(folder, plan, record, options, site, screen, source)
        engine.take_up()
        return _run(engine, folder, plan, record, screen, range(len(plan.jobs)), command or runs(folder))


def resume(
    folder: SweepFolder,
    plan: Plan,
    wanted: Wanted,
    options: SweepConfig,
    site: Site,
    command: Command | None = None,
    propose: Propose | None = None,
) -> int:
    """Go on with a sweep: jobs that are done never run again, and those that still run elsewhere are followed.

    Raises SweepFailed, Interrupted, SpecError.
    """
    with held(folder):
        refuse_changed(folder, plan)
        record = Record.read(folder)
        record.grow(len(plan.jobs))  # a search was killed between the two files
        screen = SweepScreen(folder, plan, record, options.trials)
        source = None if propose is None or wanted.only else Trials(folder, plan, options, propose, screen.say)
        site.admit(needs(plan, options, record))
        engine = Engine(folder, plan, record, options, site, screen, source)
        engine.take_up()
        todo = [index for index in chosen(record, wanted) if index not in engine.followed]
        counts = ", ".join(f"{count} {state}" for state, count in record.count().items())
        new = 0 if source is None else max((options.trials or 0) - len(plan.jobs), 0)
        screen.say(f"sweep    {shown(folder.root)}: {counts}; now {len(todo) + new} to run")
        if not todo and not new and not engine.followed:
            return _end(folder, plan, record, screen, None)
        record.wait(todo)
        return _run(engine, folder, plan, record, screen, todo, command or runs(folder))


def report(where: str) -> int:
    """Write results.csv, results.json and report.html again, of one that died with what its jobs noted; returns 0."""
    folder, plan = plans.find(where)
    record = Record.read(folder)
    for line in () if is_held(folder) else catch_up(folder, record):
        print(line)
    results = gather(folder, plan, record)
    write_files(results)
    write_page(results)
    print(shown(folder.report))
    return 0


def runs(folder: SweepFolder) -> Command:
    """What starts a job in a process of its own, or goes on with it where it has begun."""

    def command(job: JobPlan, begun: bool) -> list[str]:
        run = folder.run(job.index)
        runner = [sys.executable, "-P", "-m", "runner"]
        if begun:
            return [*runner, "resume", str(run.root), *job.again]
        return [*runner, "--spec", str(folder.spec(job.index)), "--folder", str(run.root), *job.again]

    return command


def chosen(record: Record, wanted: Wanted) -> list[int]:
    """The jobs to run now. Raises EnvironmentProblem for one that is not there, or is done."""
    for index in wanted.only:
        if not 0 <= index < len(record):
            raise EnvironmentProblem(f"--only {index}: the jobs are 0 to {len(record) - 1}")
        if record[index].state in FINISHED:
            text = f"--only {index}: job {index} is {record[index].state}; a finished job is not run again"
            raise EnvironmentProblem(text)

    def is_wanted(index: int, job: JobState) -> bool:
        if wanted.only:
            return index in wanted.only
        return job.state not in FINISHED and (wanted.retry_failed or job.state not in FAILED)

    return [index for index, job in enumerate(record) if is_wanted(index, job)]


def refuse_changed(folder: SweepFolder, plan: Plan) -> None:
    """Raise SpecError naming every option of a jobs/*.yaml that is not what was planned."""
    problems = []
    for job in plan.jobs:
        path = folder.spec(job.index)
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
        now, before = dict(leaves(content)), dict(leaves(plan.data(job)))
        for key in dict.fromkeys([*before, *now]):
            if now.get(key) != before.get(key) or (key in now) != (key in before):
                text = (
                    f"was {_said(key, before)} when the sweep began, is {_said(key, now)}; put it back, or start anew"
                )
                problems.append(Problem(key, text, shown(path)))
    if problems:
        raise SpecError(problems)


def _said(key: str, values: Mapping[str, Any]) -> str:
    return repr(values[key]) if key in values else "not there"


def needs(plan: Plan, options: SweepConfig, record: Record | None = None) -> list[Need]:
    """What the jobs occupy, those that a search is still to propose included; with a record, without finished ones."""
    later = [] if plan.search is None else [plan.search.need] * max((options.trials or 0) - len(plan.jobs), 0)
    left = [job for job in plan.jobs if record is None or record[job.index].state not in FINISHED]
    return [job.need for job in left] + later


def _run(
    engine: Engine,
    folder: SweepFolder,
    plan: Plan,
    record: Record,
    screen: SweepScreen,
    todo: Sequence[int],
    command: Command,
) -> int:
    with _open(screen):
        engine.run(todo, command)
    return _end(folder, plan, record, screen, engine.interrupted)


@contextmanager
def _open(screen: SweepScreen) -> Iterator[None]:
    screen.open()
    try:
        yield
    finally:
        screen.close()


def _end(folder: SweepFolder, plan: Plan, record: Record, screen: SweepScreen, signal_number: int | None) -> int:
    results = gather(folder, plan, record)
    write_files(results)
    write_page(results)
    screen.say_all(words.ending(results))
    name, total = words.name_of(folder), len(record)
    failed = sum(job.state in FAILED for job in record)
    left = sum(job.state not in FAILED | FINISHED for job in record)
    if signal_number is not None:
        raise Interrupted(
            signal_number, f"{total - failed - left} of {total} jobs done; go on    run sweep resume {name}"
        )
    if left:
        raise SweepFailed(f"{failed} of {total} jobs failed, {left} not finished\n  go on    run sweep resume {name}")
    if failed:
        raise SweepFailed(
            f"{failed} of {total} jobs failed\n  try them again    run sweep resume {name} --retry-failed"
        )
    return 0
