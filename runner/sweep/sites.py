"""Where the jobs of a sweep run: the kinds of `site` that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from runner.sweep import local
from runner.sweep.config import SweepConfig
from runner.sweep.ray import site as ray
from runner.sweep.site import Site
from runner.sweep.slurm import site as slurm

SITES: Mapping[str, Callable[[SweepConfig], AbstractContextManager[Site]]] = {
    "local": local.opened,
    "ray": ray.opened,
    "slurm": slurm.opened,
}


def opened(options: SweepConfig) -> AbstractContextManager[Site]:
    """The place that `sweep.on` names, until the block ends. Raises EnvironmentProblem where it cannot be reached."""
    return SITES[options.on](options)
