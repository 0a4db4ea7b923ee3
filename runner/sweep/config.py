"""What can be set of a sweep: what varies, how the jobs are run, and what makes one of them the best."""

from typing import Any, Literal

from pydantic import Field

from runner.spec.base import Config


class SweepConfig(Config):
    """How the jobs of a sweep are run (run -m); no part of a job."""

    over: dict[str, list[Any] | str] = Field(
        default_factory=dict,
        description="What varies, in a recipe: key → list of values, or a text such as range(1,4).",
    )
    parallel: int | None = Field(default=None, ge=1, description="Jobs at once; null = as many as fit on this machine.")
    fail_fast: bool = Field(default=False, description="Stop all jobs when one has failed.")
    max_failures: int | None = Field(
        default=None, ge=1, description="Stop all jobs when so many have failed; null = never."
    )
    retries: int = Field(
        default=0, ge=0, description="More tries for a job that was killed or ran out of memory (exit code 75)."
    )
    retry_wait_s: float | None = Field(
        default=None, gt=0, description="Seconds before the first of the retries, doubled each time; null = 10."
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds for one try of a job, which is then stopped; null = no limit."
    )
    grace_s: float = Field(
        default=60.0, gt=0, description="Seconds for a job that is told to stop, to save and end; then it is killed."
    )
    search: Literal["optuna"] | None = Field(
        default=None, description="Who chooses the values; null = every combination is run."
    )
    trials: int | None = Field(default=None, ge=1, description="Jobs of a search, in all.")
    sampler: Literal["tpe", "random", "nsgaii", "gp", "cmaes", "qmc"] | None = Field(
        default=None, description="How a search chooses; null = tpe. gp, cmaes and qmc need packages of their own."
    )
    prune: bool = Field(
        default=False,
        description="Stop jobs of a search whose metric is worse than the median of the others' at that step.",
    )
    metric: str | None = Field(
        default=None,
        description="Metric that ranks the jobs; null = checkpoint.best, or the first held-out metric that all have.",
    )
    metric_mode: Literal["max", "min"] | None = Field(
        default=None, description="Whether more or less of the metric is better; null = known from its name."
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = []
        if self.fail_fast and self.max_failures is not None:
            found.append(("sweep.max_failures", "sweep.fail_fast=true stops at the first failure; leave one out"))
        if self.retry_wait_s is not None and not self.retries:
            found.append(("sweep.retry_wait_s", "is for sweep.retries, which is 0; leave it out"))
        if self.metric_mode is not None and self.metric is None:
            found.append(("sweep.metric_mode", "is for sweep.metric; leave it out"))
        if self.search is None:
            unused = (("trials", self.trials), ("sampler", self.sampler), ("prune", self.prune))
            found += [(f"sweep.{name}", "is for sweep.search=optuna; leave it out") for name, value in unused if value]
        elif self.trials is None:
            found.append(("sweep.trials", "must be given: sweep.trials=20 (jobs of the search, in all)"))
        return found
