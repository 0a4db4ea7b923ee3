"""The options of a sweep: what varies, how the jobs run, and how they are ranked."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from runner.launch.config import Account, Gres, Partition, Qos, Sbatch, sbatch_problems
from runner.spec.base import Config, Names

Better = Literal["max", "min"]
SLURM = ("partition", "account", "qos", "gres", "cpus", "sbatch")
SET_BY_SWEEP = {
    **dict.fromkeys(("array", "job-name", "comment", "dependency", "output", "error", "signal"), "the sweep itself"),
    **{name: f"sweep.{name}" for name in ("partition", "account", "qos", "gres")},
    **{"cpus-per-task": "sweep.cpus", "nodes": "launch", "ntasks": "launch", "ntasks-per-node": "launch"},
}  # options that sweep.sbatch must not set → what sets them


class SweepConfig(Config):
    """How the jobs of a sweep run (run -m); not part of a job."""

    over: dict[str, list[Any] | str] = Field(
        default_factory=dict,
        description="Values to vary, in a recipe: key → list of values, or a text such as range(1,4).",
    )
    on: Literal["local", "ray", "slurm"] = Field(
        default="local", description="Executor of the jobs: this machine, a Ray cluster, or Slurm."
    )
    address: str | None = Field(
        default=None, description="Address of the Ray cluster, host:port or auto; null = a local one for this sweep."
    )
    partition: Partition = None
    account: Account = None
    qos: Qos = None
    gres: Gres = None
    cpus: int | None = Field(
        default=None,
        ge=1,
        description="Cores per job on Slurm; null = device.threads for each of its processes; on cards, the cluster's "
        "default.",
    )
    sbatch: Sbatch = Field(default_factory=dict)
    parallel: int | None = Field(default=None, ge=1, description="Number of concurrent jobs; null = all that fit.")
    fail_fast: bool = Field(default=False, description="Stop all jobs when one fails.")
    max_failures: int | None = Field(
        default=None, ge=1, description="Stop all jobs after this many failures; null = never."
    )
    retries: int = Field(
        default=0, ge=0, description="Retries of a job that was killed or ran out of memory (exit code 75)."
    )
    retry_wait_s: float | None = Field(
        default=None, gt=0, description="Seconds before the first retry, doubled each time; null = 10."
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="Timeout in seconds of one attempt of a job; null = no limit."
    )
    grace_s: float = Field(
        default=60.0, gt=0, description="Seconds that a stopped job has to save and exit; then it is killed."
    )
    search: Literal["optuna"] | None = Field(
        default=None, description="Search algorithm that chooses the values; null = every combination."
    )
    trials: int | None = Field(default=None, ge=1, description="Number of jobs of a search.")
    sampler: Literal["tpe", "random", "nsgaii", "gp", "cmaes", "qmc"] | None = Field(
        default=None, description="Sampler of the search; null = tpe."
    )
    prune: bool = Field(
        default=False,
        description="Stop jobs of a search whose metric is worse than the median of the others at that step.",
    )
    metric: str | Names | None = Field(
        default=None,
        description="Metric that ranks the jobs, or several; null = checkpoint.best, or the first usual metric (of "
        "held-out data, reward, loss) that all have.",
    )
    metric_mode: Better | Annotated[tuple[Better, ...], Field(strict=False)] | None = Field(
        default=None,
        description="Whether higher (max) or lower (min) is better, per metric; null = derived from its name.",
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        client = "Ray's client cannot follow the jobs; run the sweep on a node of the cluster, with host:port or auto"
        checks = [
            (self.fail_fast and self.max_failures is not None, "max_failures",
             "sweep.fail_fast=true stops at the first failure; leave one out"),
            (self.retry_wait_s is not None and not self.retries, "retry_wait_s",
             "needs sweep.retries above 0; leave it out"),
            (self.metric_mode is not None and self.metric is None, "metric_mode", "needs sweep.metric; leave it out"),
            (self.address is not None and self.on != "ray", "address", "needs sweep.on=ray; leave it out"),
            (self.on == "ray" and "://" in (self.address or ""), "address", client),
            *self._of_slurm(),
            *self._of_metrics(),
            *self._of_search(),
        ]  # fmt: skip
        return [(f"sweep.{name}", text) for is_wrong, name, text in checks if is_wrong]

    def _of_slurm(self) -> Iterator[tuple[bool, str, str]]:
        if self.on != "slurm":
            yield from ((bool(getattr(self, name)), name, "needs sweep.on=slurm; leave it out") for name in SLURM)
            return
        yield from ((True, "sbatch", text) for text in sbatch_problems(self.sbatch, SET_BY_SWEEP))
        text = "time is set by sweep.timeout_s; leave one of them out"
        yield "time" in self.sbatch and self.timeout_s is not None, "sbatch", text
        text = "must be set: a search uses the results of earlier jobs"
        yield self.search is not None and self.parallel is None, "parallel", text

    def _of_metrics(self) -> Iterator[tuple[bool, str, str]]:
        metrics, modes = as_tuple(self.metric), as_tuple(self.metric_mode)
        yield self.metric is not None and not metrics, "metric", "names no metric; leave it out"
        yield len(set(metrics)) < len(metrics), "metric", "names a metric twice; leave one out"
        text = f"has {len(modes)} entries for {len(metrics)} metrics; set max or min for each, in their order"
        yield bool(modes and metrics) and len(modes) != len(metrics), "metric_mode", text
        text = "early stopping of jobs needs one metric, but sweep.metric has several; leave it out, or set one"
        yield self.prune and len(metrics) > 1, "prune", text

    def _of_search(self) -> Iterator[tuple[bool, str, str]]:
        if self.search is None:
            unused = (("trials", self.trials), ("sampler", self.sampler), ("prune", self.prune))
            yield from ((bool(value), name, "needs sweep.search=optuna; leave it out") for name, value in unused)
        else:
            yield self.trials is None, "trials", "must be set, e.g. sweep.trials=20 (number of jobs of the search)"


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The values of an option that has one value, several, or none."""
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
