"""Optuna as the source of a sweep's jobs: asked for one whenever a slot is free, told what became of each.

    ask ─▶ values ─▶ job ─▶ running ─▶ tell: value | pruned | failed
                              └─ report each new value ─▶ worse than the others were at this step? ─▶ stop

The study is a journal in the sweep's folder, so that a search goes on where it stopped. Jobs need not know of Optuna.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.errors import EnvironmentProblem
from runner.sweep.config import SweepConfig
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder
from runner.sweep.record import FAILED, JobState
from runner.sweep.space import Dimension
from runner.sweep.watch import Watch

JOB = "job"  # the attribute of a trial that names its job
STARTUP = 4  # trials that must have ended before one is stopped early
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "nsgaii": "NSGAIISampler", "gp": "GPSampler",
            "cmaes": "CmaEsSampler", "qmc": "QMCSampler"}  # fmt: skip

Propose = Callable[[int, Sequence[str], Mapping[str, str]], JobPlan]  # (number, words, what it varies) → its plan


class Trials:
    """The study of one sweep. Raises EnvironmentProblem where Optuna, or what a sampler needs, is missing."""

    def __init__(self, folder: SweepFolder, plan: Plan, options: SweepConfig, propose: Propose) -> None:
        optuna, self._plan, self._propose = _optuna(), plan, propose
        assert plan.search is not None and options.trials is not None  # the options' own check
        self._search, self._count, self._prune = plan.search, options.trials, options.prune
        assert plan.ranking is not None  # a search without a metric is refused where it is composed
        self._ranking: Ranking = plan.ranking
        self._space = {d.key: _distribution(optuna, d) for d in self._search.space}
        backend = optuna.storages.journal.JournalFileBackend(str(folder.root / "optuna.log"))
        try:
            sampler = getattr(optuna.samplers, SAMPLERS[options.sampler or "tpe"])(seed=int(plan.base.get("seed", 0)))
        except ImportError as error:
            raise EnvironmentProblem(f"sweep.sampler={options.sampler}: {error}") from error
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name="sweep",
            load_if_exists=True,
            direction="maximize" if self._ranking.mode == "max" else "minimize",
            sampler=sampler,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
        )
        self._states = optuna.trial.TrialState
        self._trials: dict[int, Any] = {}
        self._reported: dict[int, int] = {}
        self._restore(optuna)

    def next(self) -> JobPlan | None:
        """The next job; None when all trials have been proposed."""
        if len(self._plan.jobs) >= self._count:
            return None
        trial = self._study.ask(self._space)
        index = len(self._plan.jobs)
        trial.set_user_attr(JOB, index)
        self._trials[index] = trial
        return self._propose(index, *self._search.words(trial.params))

    def is_hopeless(self, index: int, watch: Watch) -> bool:
        """Whether a running job is to be stopped early; takes in the newest value of its metric."""
        step = watch.steps.get(self._ranking.metric)
        trial = self._trials.get(index)
        if not self._prune or trial is None or step is None or self._reported.get(index) == step:
            return False
        self._reported[index] = step
        trial.report(watch.values[self._ranking.metric], step)
        return bool(trial.should_prune())

    def ended(self, index: int, state: JobState, value: float | None) -> None:
        """Tell the study what became of a job. One that was interrupted goes on later, and is told then."""
        trial = self._trials.get(index)
        if trial is None or state.state not in (*FAILED, "done", "pruned"):
            return
        if state.state == "done" and value is not None and math.isfinite(value):
            if not self._tell(trial, value):  # it had failed before, and was tried again
                self._again(trial, value)
            return
        told = self._states.PRUNED if state.state == "pruned" else self._states.FAIL
        self._study.tell(trial, state=told, skip_if_finished=True)

    def _tell(self, trial: Any, value: float) -> bool:
        before = self._study.trials[trial.number].state
        self._study.tell(trial, value, skip_if_finished=True)
        return not before.is_finished()

    def _again(self, trial: Any, value: float) -> None:
        optuna = _optuna()
        known = {"params": trial.params, "distributions": trial.distributions, "value": value}
        self._study.add_trial(optuna.trial.create_trial(**known))

    def _restore(self, optuna: Any) -> None:
        """Find the trials of the jobs of an earlier start; one that never became a job is given up."""
        for frozen in self._study.trials:
            index = frozen.user_attrs.get(JOB)
            if index is not None and index < len(self._plan.jobs):
                self._trials[index] = optuna.trial.Trial(self._study, frozen._trial_id)
            elif not frozen.state.is_finished():
                self._study.tell(frozen.number, state=self._states.FAIL)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        text = "sweep.search=optuna needs the package optuna: pip install 'posttrain-run[optuna]'"
        raise EnvironmentProblem(text) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    if dimension.kind == "choice":
        return optuna.distributions.CategoricalDistribution([word for word, _ in dimension.values])
    if dimension.kind == "float":
        return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    low, high = int(dimension.low), int(dimension.high)
    return optuna.distributions.IntDistribution(low, high, log=dimension.log, step=dimension.step)
