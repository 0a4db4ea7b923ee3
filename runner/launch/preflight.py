"""What the parts of a job find missing on this machine, all of it before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from runner.core.errors import EnvironmentProblem, NotReady, RunnerError
from runner.spec.job import JobSpec


def preflights(spec: JobSpec, *, here: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """(part of the job, what it checks of this machine) in the order in which to install what is missing."""
    if here:
        yield "device", spec.device.preflight
        yield "sampler", spec.sampler.preflight_here
    yield "launch", spec.launch.preflight
    if here:
        yield "optimizer", spec.optimizer.preflight
        yield "model", spec.model.preflight
    yield "parallelism", spec.parallelism.preflight
    yield "sampler", spec.sampler.preflight
    yield "reward", spec.reward.preflight
    yield "data", lambda: spec.data.preflight(spec.algorithm.item_kind)


def refuse_unready(checks: Iterable[Callable[[], None]]) -> None:
    """Raise NotReady with all that these checks find missing, or the first other RunnerError if nothing is missing."""
    faults: list[RunnerError] = []
    for check in checks:
        try:
            check()
        except RunnerError as error:
            if not (faults or isinstance(error, EnvironmentProblem)):
                raise
            faults.append(error)
    if faults:
        raise NotReady(faults)
