"""Optuna as the source of a sweep's jobs: asked for one whenever a slot is free, told what became of each.

    ask ─▶ values ─▶ job ─▶ running ─▶ tell: its values | pruned | failed
                              └─ report each new value ─▶ worse than the others were at this step? ─▶ stop

The study is a journal in the sweep's folder, so that a search goes on where it stopped. Jobs need not know of Optuna.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.errors import Problem, SpecError
from runner.sweep.config import SweepConfig
from runner.sweep.plan import JobPlan, Plan, SweepFolder
from runner.sweep.record import FAILED, FINISHED, JobState, Record
from runner.sweep.results import values_of
from runner.sweep.samplers import load, sampler
from runner.sweep.space import Dimension
from runner.sweep.watch import Watch

JOB = "job"  # the attribute of a trial that names its job
STARTUP = 4  # trials that must have ended before one is stopped early
MOST_REFUSED = 50  # proposals in a row that are no job

Propose = Callable[[int, Sequence[str], Mapping[str, str]], JobPlan]  # (number, words, what it varies) → its plan
Say = Callable[[str], None]


class Trials:
    """The study of one sweep. Raises EnvironmentProblem where Optuna, or what a sampler needs, is missing."""

    def __init__(self, folder: SweepFolder, plan: Plan, options: SweepConfig, propose: Propose, say: Say) -> None:
        optuna = load(options.sampler)
        self._folder, self._plan, self._propose, self._say = folder, plan, propose, say
        assert plan.search is not None and options.trials is not None  # the options' own check
        assert plan.rankings  # a search without a metric is refused where it is composed
        self._search, self._count, self._prune = plan.search, options.trials, options.prune
        self._optuna = optuna
        self._space = {d.name: _distribution(optuna, d) for d in self._search.always}
        backend = optuna.storages.journal.JournalFileBackend(str(folder.root / "optuna.log"))
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):  # qmc
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="sweep",
                load_if_exists=True,
                directions=["maximize" if ranking.mode == "max" else "minimize" for ranking in plan.rankings],
                sampler=sampler(optuna, options.sampler, int(plan.base.get("seed", 0)), len(plan.jobs)),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
            )
            self._study.set_metric_names([ranking.metric for ranking in plan.rankings])
        self._states = optuna.trial.TrialState
        self._trials: dict[int, Any] = {}
        self._reported: dict[int, int] = {}
        self._restore()

    def next(self) -> JobPlan | None:
        """The next job; None when all trials have been proposed. Raises SpecError where too many proposals are none."""
        if len(self._plan.jobs) >= self._count:
            return None
        index = len(self._plan.jobs)
        for _ in range(MOST_REFUSED):
            trial, values = self._ask()
            words, varied = self._search.words(values)
            try:
                job = self._propose(index, words, varied)
            except SpecError as error:
                reason = error
                self._study.tell(trial, state=self._states.FAIL)
                said = " ".join(f"{key}={value}" for key, value in varied.items())
                self._say(f"trial {trial.number}  {said}: is no job, so another is drawn: {_in_line(error)}")
                continue
            trial.set_user_attr(JOB, index)
            self._trials[index] = trial
            return job
        text = f"{MOST_REFUSED} proposals in a row are no job; narrow the space, the last one's problems follow"
        raise SpecError([Problem("sweep.search", text), *reason.problems])

    def _ask(self) -> tuple[Any, dict[str, Any]]:
        """A new trial, and its values: first those of every job, then those that come with what was chosen."""
        trial = self._study.ask(self._space)
        values = dict(trial.params)
        for dimension in self._search.only_in(values):
            values[dimension.name] = _suggest(trial, dimension)
        return trial, values

    def is_hopeless(self, index: int, watch: Watch) -> bool:
        """Whether a running job is to be stopped early; takes in the newest value of its metric."""
        trial, metric = self._trials.get(index), self._plan.rankings[0].metric
        step = watch.steps.get(metric)
        if not self._prune or trial is None or step is None or step <= self._reported.get(index, -1):
            return False
        self._reported[index] = step
        trial.report(watch.values[metric], step)
        return bool(trial.should_prune())

    def ended(self, index: int, state: JobState) -> None:
        """Tell the study what became of a job. One that was interrupted goes on later, and is told then."""
        trial = self._trials.get(index)
        if trial is None or state.state not in FAILED | FINISHED:
            return
        values = values_of(self._folder, self._plan, index)
        if state.state == "done" and values is not None:
            if not self._tell(trial, values):  # it had failed before, and was tried again
                self._again(trial, values)
            return
        if state.state == "done":
            metrics = ", ".join(ranking.metric for ranking in self._plan.rankings)
            self._say(f"job {index}  is done without a finite {metrics}: the search takes it as failed")
        told = self._states.PRUNED if state.state == "pruned" else self._states.FAIL
        self._study.tell(trial, state=told, skip_if_finished=True)

    def _tell(self, trial: Any, values: Sequence[float]) -> bool:
        before = self._study.trials[trial.number].state
        self._study.tell(trial, list(values), skip_if_finished=True)
        return not before.is_finished()

    def _again(self, trial: Any, values: Sequence[float]) -> None:
        known = {"params": trial.params, "distributions": trial.distributions, "values": list(values)}
        self._study.add_trial(self._optuna.trial.create_trial(**known))

    def _restore(self) -> None:
        """Find the trials of the jobs of an earlier start, and tell what a crash kept from being told; a trial that
        never became a job is given up."""
        states = list(Record.read(self._folder)) if self._folder.state.exists() else []
        for frozen in self._study.trials:
            index = frozen.user_attrs.get(JOB)
            if index is not None and index < len(self._plan.jobs):
                self._trials[index] = self._optuna.trial.Trial(self._study, frozen._trial_id)
                self._reported[index] = max(frozen.intermediate_values, default=-1)
                if not frozen.state.is_finished() and index < len(states):
                    self.ended(index, states[index])
            elif not frozen.state.is_finished():
                self._study.tell(frozen.number, state=self._states.FAIL)


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    if dimension.kind == "choice":
        return optuna.distributions.CategoricalDistribution([word for word, _ in dimension.values])
    if dimension.kind == "float":
        return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    low, high = int(dimension.low), int(dimension.high)
    return optuna.distributions.IntDistribution(low, high, log=dimension.log, step=dimension.step)


def _suggest(trial: Any, dimension: Dimension) -> Any:
    if dimension.kind == "choice":
        return trial.suggest_categorical(dimension.name, [word for word, _ in dimension.values])
    if dimension.kind == "float":
        return trial.suggest_float(dimension.name, dimension.low, dimension.high, log=dimension.log)
    low, high = int(dimension.low), int(dimension.high)
    return trial.suggest_int(dimension.name, low, high, log=dimension.log, step=dimension.step)


def _in_line(error: SpecError) -> str:
    return "; ".join(f"{problem.key}: {problem.message}" for problem in error.problems)
