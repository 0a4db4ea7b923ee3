"""Optuna proposes the jobs of a sweep, one per free slot, and receives each result.

    ask ─▶ values ─▶ job ─▶ running ─▶ tell: its values | pruned | failed
                              └─ report each new value ─▶ worse than the others were at this step? ─▶ stop

The study is a journal in the sweep's folder, so that a resumed search continues it. Jobs do not depend on Optuna.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.sweep.config import SweepConfig
from runner.sweep.executor import Say
from runner.sweep.job import FAILED, FINISHED
from runner.sweep.plan import JobPlan, JobState, Plan, SweepFolder, SweepState
from runner.sweep.results import MetricsTail, ranking_values
from runner.sweep.space import Dimension, SearchSpace

JOB = "job"  # the attribute of a trial that names its job
STARTUP = 4  # trials that must have ended before one is stopped early
MOST_REFUSED = 50  # invalid proposals in a row

CLASSES = {"tpe": "TPESampler", "random": "RandomSampler", "nsgaii": "NSGAIISampler", "gp": "GPSampler",
           "cmaes": "CmaEsSampler", "qmc": "QMCSampler"}  # fmt: skip
PACKAGES = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",), "qmc": ("scipy",)}
NUMBERS_ONLY = ("cmaes", "qmc")  # they sample choices at random
FIXED_SPACE = ("gp", "cmaes", "qmc")  # they sample keys that only some jobs have at random
DEFAULT = "tpe"

Propose = Callable[[int, Sequence[str], Mapping[str, str]], JobPlan]  # (number, words, what it varies) → its plan


class OptunaTrials:
    """The study of one sweep. Raises EnvironmentProblem if Optuna or a package of its sampler is missing."""

    def __init__(self, folder: SweepFolder, plan: Plan, options: SweepConfig, propose: Propose, say: Say) -> None:
        optuna = load_optuna(options.sampler)
        self._folder, self._plan, self._propose, self._say = folder, plan, propose, say
        assert plan.search is not None and options.trials is not None  # checked by the options
        assert plan.rankings  # checked when the sweep is composed
        self._search, self._count, self._prune = plan.search, options.trials, options.prune
        self._optuna = optuna
        backend = optuna.storages.journal.JournalFileBackend(str(folder.root / "optuna.log"))
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):  # qmc
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="sweep",
                load_if_exists=True,
                directions=["maximize" if ranking.mode == "max" else "minimize" for ranking in plan.rankings],
                sampler=make_sampler(optuna, options.sampler, int(plan.base.get("seed", 0)), len(plan.jobs)),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
            )
            self._study.set_metric_names([ranking.metric for ranking in plan.rankings])
        self._states = optuna.trial.TrialState
        self._trials: dict[int, Any] = {}
        self._reported: dict[int, int] = {}
        self._restore()

    def propose_next(self) -> JobPlan | None:
        """The next job; None after the last trial. Raises SpecError after too many invalid proposals."""
        if len(self._plan.jobs) >= self._count:
            return None
        index = len(self._plan.jobs)
        for _ in range(MOST_REFUSED):
            trial = self._study.ask()
            values = {dimension.name: _suggest(trial, dimension) for dimension in self._search.always}
            values |= {dimension.name: _suggest(trial, dimension) for dimension in self._search.only_in(values)}
            words, varied = self._search.words(values)
            try:
                job = self._propose(index, words, varied)
            except SpecError as error:
                reason = error
                self._study.tell(trial, state=self._states.FAIL)
                shown = " ".join(f"{key}={value}" for key, value in varied.items())
                why = "; ".join(f"{problem.key}: {problem.message}" for problem in error.problems)
                self._say(f"trial {trial.number}  {shown}: not a valid job, so another one is sampled: {why}")
                continue
            trial.set_user_attr(JOB, index)
            self._trials[index] = trial
            return job
        text = f"{MOST_REFUSED} proposals in a row were not valid jobs; narrow the space. The last one's problems"
        raise SpecError([Problem("sweep.search", text), *reason.problems])

    def should_prune(self, index: int, metrics: MetricsTail) -> bool:
        """Report the newest value of a running job; returns whether to stop it early."""
        trial, metric = self._trials.get(index), self._plan.rankings[0].metric
        step = metrics.steps.get(metric)
        if not self._prune or trial is None or step is None or step <= self._reported.get(index, 0):
            return False
        self._reported[index] = step
        trial.report(metrics.values[metric], step)
        return bool(trial.should_prune())

    def record_end(self, index: int, state: JobState) -> None:
        """Report the result of a job to the study; an interrupted job is reported after it is resumed."""
        trial = self._trials.get(index)
        if trial is None or state.state not in FAILED | FINISHED:
            return
        values = ranking_values(self._folder, self._plan, index)
        if state.state == "done" and values is not None:
            if self._study.trials[trial.number].state.is_finished():  # it failed earlier and was retried
                known = {"params": trial.params, "distributions": trial.distributions, "values": list(values)}
                self._study.add_trial(self._optuna.trial.create_trial(**known))
            else:
                self._study.tell(trial, list(values))
            return
        if state.state == "done":
            metrics = ", ".join(ranking.metric for ranking in self._plan.rankings)
            self._say(f"job {index}  finished without a finite {metrics}: the search counts it as failed")
        ended = self._states.PRUNED if state.state == "pruned" else self._states.FAIL
        self._study.tell(trial, state=ended, skip_if_finished=True)

    def _restore(self) -> None:
        """Find the trials of an earlier start, and report results that were lost in a crash.

        A trial that never became a job is marked as failed.
        """
        states = list(SweepState.read(self._folder)) if self._folder.state.exists() else []
        for frozen in self._study.trials:
            index = frozen.user_attrs.get(JOB)
            if index is not None and index < len(self._plan.jobs):
                self._trials[index] = self._optuna.trial.Trial(self._study, frozen._trial_id)
                self._reported[index] = max(frozen.intermediate_values, default=-1)
                if not frozen.state.is_finished() and index < len(states):
                    self.record_end(index, states[index])
            elif not frozen.state.is_finished():
                self._study.tell(frozen.number, state=self._states.FAIL)


def _suggest(trial: Any, dimension: Dimension) -> Any:
    if dimension.kind == "choice":
        return trial.suggest_categorical(dimension.name, [word for word, _ in dimension.values])
    if dimension.kind == "float":
        return trial.suggest_float(dimension.name, dimension.low, dimension.high, log=dimension.log)
    low, high = int(dimension.low), int(dimension.high)
    return trial.suggest_int(dimension.name, low, high, log=dimension.log, step=dimension.step)


def load_optuna(name: str | None) -> Any:
    """The optuna module. Raises EnvironmentProblem if it, or a package of the sampler, is missing."""
    wanted = ("optuna", *PACKAGES.get(name or DEFAULT, ()))
    if missing := [package for package in wanted if find_spec(package) is None]:
        what = "sweep.search=optuna" if "optuna" in missing else f"sweep.sampler={name}"
        text = f"{what} needs the package {' and '.join(missing)}: pip install 'posttrain-run[optuna]'"
        raise EnvironmentProblem(text)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def make_sampler(optuna: Any, name: str | None, seed: int, jobs: int) -> Any:
    """A sampler for a study with `jobs` jobs so far, which also determine the seed.

    A sampler whose state is not in the study must not repeat its first samples after a resume.
    """
    kind = name or DEFAULT
    return getattr(optuna.samplers, CLASSES[kind])(seed=seed if kind == "qmc" else seed + jobs)


def search_problems(options: SweepConfig, search: SearchSpace, objectives: int) -> list[Problem]:
    """What the sampler, or Optuna, does not support."""
    name = options.sampler or DEFAULT
    choices = [d.key for d in search.space if d.kind == "choice"]
    sometimes = [d.name for d in search.space if d.given]
    size, own = search.size(), "sweep.sampler"
    checks = [
        (name in NUMBERS_ONLY and choices, own,
         f"{name} supports only numbers, but {', '.join(choices)} is a choice; use tpe, nsgaii, gp or random"),
        (name in FIXED_SPACE and sometimes, own,
         f"{name} needs the same varied keys in all jobs, unlike {', '.join(sometimes)}; use tpe, nsgaii or random"),
        (name == "cmaes" and not choices and len(search.space) < 2, own,
         "cmaes needs two or more numbers; for one type sweep.sampler=tpe or gp"),
        (name == "cmaes" and objectives > 1, own,
         "cmaes supports one metric; for several type sweep.sampler=tpe, nsgaii, gp, qmc or random"),
        (size is not None and options.trials is not None and size < options.trials, "sweep.trials",
         f"there are only {size} different jobs; set sweep.trials to at most {size}, or leave sweep.search out"),
    ]  # fmt: skip
    return [Problem(key, text) for is_wrong, key, text in checks if is_wrong]
